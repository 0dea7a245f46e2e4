"""Trains wan-shapes: `python -m training.wan_shapes --vae DIR/vae --out DIR --export DIR --minutes 8`.

Flow matching with dropped prompts, so that classifier-free guidance with an empty negative prompt works.
"""

from training.options import flow_options
from training.wan_shapes.train import train


def main() -> None:
    train(flow_options(__doc__, minutes=14.0, batch=256, pool=20_000, chunk=32).parse_args())


if __name__ == "__main__":
    main()
