"""Mutation testing of the modules that pyproject.toml lists for mutmut: `make mutants`.

mutmut changes one expression of a function at a time. A changed function is called a mutant. A mutant is killed if a
test of its module fails, otherwise the mutant survives. Two things differ from plain mutmut:

- The tests of a module NAME.py are the selected tests in files test_NAME.py. For a module without such a file,
  `tested_by` in mutants.toml names the module whose tests are taken. Plain mutmut takes the tests that call a function.
  But JAX calls a compiled function only while tracing it, and pytest makes a shared fixture only in its first test.
- Decorated functions are changed too, because properties (`@property`) compute the verdicts.

Constants of a module are not changed. A timeout also kills a mutant. The exit code is 1 if the survivors differ from
the list in mutants.toml, which has a reason for each. `mutmut run PATTERN`, `mutmut show NAME` and `mutmut browse` read
the folder mutants/, which this program writes.
"""

import gc
import sys
import tomllib
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import libcst as cst
import mutmut.__main__ as mutmut
from mutmut.runners.harness import PytestRunner
from mutmut.state import state
from mutmut.utils.format_utils import get_module_from_key
from mutmut.utils.format_utils import mangled_name_from_mutant_name as function_of

IMPORTED_LATE = ("sacrebleu.metrics", "sklearn.metrics", "statsmodels.stats.multitest")
"""Modules that tested functions import when called. This program imports them once, before it forks a process for each
mutant."""

LISTED = Path(__file__).with_name("mutants.toml")
TESTED_BY = tomllib.loads(LISTED.read_text())["tested_by"]


class Mutant(NamedTuple):
    """A changed function: its name, the original text of the changed lines, and the new text of these lines."""

    function: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.function}\n  - {self.old}\n  + {self.new}"


def own_tests(function: str, seconds: dict[str, float]) -> list[str]:
    """Returns the tests of a function's module, fastest first. `seconds` maps every test to its duration."""
    module = get_module_from_key(function).rpartition(".")[2]
    file = f"test_{TESTED_BY.get(module, module)}.py"
    own = [test for test in seconds if Path(test.partition("::")[0]).name == file]
    return sorted(own, key=seconds.get)


class Undecorated(cst.CSTTransformer):
    """Turns `@property def f` into `def f` and `f = property(f)`, because mutmut skips decorated functions.

    Treats all decorators like this, except `classmethod` and `staticmethod`.
    """

    def leave_FunctionDef(self, original_node, updated_node):
        name, decorators = updated_node.name.value, updated_node.decorators
        kept = ("classmethod", "staticmethod")
        if not decorators or getattr(decorators[0].decorator, "value", None) in kept:
            return updated_node
        value = cst.Name(name)
        for decorator in reversed(decorators):
            value = cst.Call(decorator.decorator, [cst.Arg(value)])
        assignment = cst.Assign([cst.AssignTarget(cst.Name(name))], value)
        function = updated_node.with_changes(decorators=[])
        return cst.FlattenSentinel([function, cst.SimpleStatementLine([assignment])])


def run() -> None:
    """Runs the tests of a module on every mutant of the module."""
    write, collect = mutmut.write_all_mutants_to_file, mutmut.run_stats_collection
    warm_up = PytestRunner.warm_up

    def write_undecorated(*, out, source, filename):
        source = cst.parse_module(source).visit(Undecorated()).code
        return write(out=out, source=source, filename=filename)

    def collect_own(runner, tests=None) -> None:
        collect(runner, tests)
        seconds, tests_of = state().duration_by_test, state().tests_by_mangled_function_name
        tests_of.update({f: own_tests(f, seconds) for f in state().current_function_hashes})
        mutmut.save_stats()

    def warm_up_and_freeze(runner) -> None:
        warm_up(runner)
        for module in IMPORTED_LATE:
            import_module(module)
        gc.freeze()  # Garbage collection in forked processes then skips JAX's objects.

    PytestRunner.warm_up = warm_up_and_freeze
    mutmut.write_all_mutants_to_file = write_undecorated
    mutmut.run_stats_collection = collect_own
    mutmut._run((), max_children=1)


def found() -> tuple[dict[str, list[bool]], set[Mutant]]:
    """Returns {module: [whether a mutant was killed or timed out, for each mutant]}, and the set of all survivors."""
    killed, survivors = defaultdict(list), set()
    for data, name, code in mutmut.collect_source_file_mutation_data(mutant_names=())[0]:
        dead = mutmut.status_by_exit_code[code] in ("killed", "timeout")
        killed[get_module_from_key(function_of(name))].append(dead)
        if not dead:
            lines = mutmut.get_diff_for_mutant(name, path=data.path).splitlines()[2:]
            old, new = (
                "\n".join(line[1:].strip() for line in lines if line.startswith(sign))
                for sign in "-+"
            )
            parts = function_of(name).replace("x_", "", 1).replace("xǁ", "").replace("ǁ", ".")
            survivors.add(Mutant(parts, old, new))
    return killed, survivors


def listed() -> set[Mutant]:
    """Returns the mutants that mutants.toml lists with a reason why they survive."""
    entries = tomllib.loads(LISTED.read_text())["mutant"]
    return {
        Mutant(e["function"], e["old"], new) for e in entries if e["reason"] for new in e["new"]
    }


def main() -> int:
    run()
    killed, survivors = found()
    for module, dead in sorted(killed.items()):
        print(
            f"{module:28} {sum(dead):4} of {len(dead):4} mutants killed  {sum(dead) / len(dead):6.1%}"
        )
    for mutant in sorted(survivors - listed()):
        print(
            f"this mutant survived: add a test that fails for it, or a reason to {LISTED.name}: {mutant}"
        )
    for mutant in sorted(listed() - survivors):
        print(f"this mutant no longer survives: remove it from {LISTED.name}: {mutant}")
    return int(survivors != listed())


if __name__ == "__main__":
    sys.exit(main())
