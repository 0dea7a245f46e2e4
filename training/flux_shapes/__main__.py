"""Trains flux-shapes: `python -m training.flux_shapes --vae DIR/vae --out DIR --export DIR --minutes 8`.

Two stages, each resumable: flow matching with dropped prompts, then guidance distillation (Meng et al., arXiv
2210.03142), after which the embedded guidance scale acts like classifier-free guidance.
"""

from training.flux_shapes.train import train
from training.options import flow_options


def main() -> None:
    parser = flow_options(__doc__, minutes=11.0, batch=512, pool=200_000, chunk=512)
    parser.add_argument("--distill-minutes", type=float, default=3.0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
