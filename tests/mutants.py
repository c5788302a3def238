"""Mutation testing of the modules that pyproject.toml lists for mutmut: `make mutants`.

mutmut changes one expression at a time; a changed module (a mutant) that all of its own tests pass survives. The own
tests of a module NAME.py are tests/**/test_NAME.py: mutmut by itself would take the tests during which a function was
called, but a compiled function is called while it is traced and a shared fixture is made for the first test only.
Fails where a module has less than 95 % of its mutants killed, and where the survivors are not those of mutants.toml.

mutmut leaves out module constants and decorated functions other than methods of a class; `mutmut run PATTERN`, `mutmut
show NAME` and `mutmut browse` work on what this program leaves in mutants/.
"""

import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import mutmut.__main__ as mutmut
from mutmut.state import state
from mutmut.utils.format_utils import get_module_from_key
from mutmut.utils.format_utils import mangled_name_from_mutant_name as function_of

LEAST = 0.95
"""The share of a module's mutants that its tests must kill."""

LISTED = Path(__file__).with_name("mutants.toml")


class Mutant(NamedTuple):
    """A change of a function: the lines that differ, as they were and as they are."""

    function: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.function}\n  - {self.old}\n  + {self.new}"


def own_tests(function: str, tests: list[str]) -> set[str]:
    """The tests, by pytest's names, of the module that a function belongs to."""
    file = f"test_{get_module_from_key(function).rpartition('.')[2]}.py"
    return {test for test in tests if Path(test.partition("::")[0]).name == file}


def run() -> None:
    """Tests every mutant on the own tests of its module."""
    collect = mutmut.run_stats_collection

    def collect_own(runner, tests=None) -> None:
        collect(runner, tests)
        names, known = list(state().duration_by_test), state().tests_by_mangled_function_name
        known.update({f: own_tests(f, names) for f in state().current_function_hashes})
        mutmut.save_stats()

    mutmut.run_stats_collection = collect_own
    mutmut._run((), max_children=1)


def found() -> tuple[dict[str, list[bool]], set[Mutant]]:
    """Whether each mutant was killed, by module, and those that were not."""
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
    """The survivors that are known, each of which has a reason."""
    entries = tomllib.loads(LISTED.read_text())["mutant"]
    return {Mutant(e["function"], e["old"], e["new"]) for e in entries if e["reason"]}


def main() -> int:
    run()
    killed, survivors = found()
    for module, dead in sorted(killed.items()):
        print(
            f"{module:28} {sum(dead):4} of {len(dead):4} mutants killed  {sum(dead) / len(dead):6.1%}"
        )
    for mutant in sorted(survivors - listed()):
        print(f"survived, and {LISTED.name} has no reason: {mutant}")
    for mutant in sorted(listed() - survivors):
        print(f"no longer survives, remove it from {LISTED.name}: {mutant}")
    low = any(sum(dead) < LEAST * len(dead) for dead in killed.values())
    return int(low or survivors != listed())


if __name__ == "__main__":
    sys.exit(main())
