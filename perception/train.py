"""Trains a text classifier: python -m perception.train --config=configs/perception.py:tiny"""

from common.runtime import program


def main() -> None:
    from common.train.command import train
    from perception.report import print_summary

    train("perception", print_summary)


if __name__ == "__main__":
    program.run(main)
