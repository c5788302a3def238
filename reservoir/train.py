"""Trains a reservoir transformer: python -m reservoir.train --config=configs/wmt_ffn_res.py:tiny"""

from common.runtime import program


def main() -> None:
    from common.train.command import train
    from reservoir.report import print_summary

    train("reservoir", print_summary)


if __name__ == "__main__":
    program.run(main, joins=True)
