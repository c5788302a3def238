"""Fine-tunes a masked language model: python -m reservoir.finetune --config=configs/sst2.py --config.pretrained=RUN"""

from common.runtime import program


def main() -> None:
    from common.train.command import train
    from reservoir.report import print_summary

    train("reservoir", print_summary, "finetune", "finetuning")


if __name__ == "__main__":
    program.run(main, joins=True)
