"""Flow matching (Lipman et al., arXiv 2210.02747): noisy latents, their velocity, and how noise levels are drawn."""

import torch
from torch import Tensor

LAYOUT_SHIFT = 3.0


def sample_sigma(batch: int, shift: float, device: torch.device, *, layout_shift: float = LAYOUT_SHIFT) -> Tensor:
    """Return noise levels (B,) in (0, 1): half uniform, half logit-normal, moved by the scheduler's shift
    (Esser et al., arXiv 2403.03206, section 5.3.2). Half of them are moved on by `layout_shift`: what goes where is
    decided where there is almost only noise, and few levels would lie there."""
    uniform = torch.rand(batch, device=device)
    u_B = torch.where(torch.rand(batch, device=device) < 0.5, uniform, torch.randn(batch, device=device).sigmoid())
    shift_B = torch.where(torch.rand(batch, device=device) < 0.5, shift, shift * layout_shift)
    return shift_B * u_B / (1 + (shift_B - 1) * u_B)


def noisy(latents: Tensor, sigma_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return latents on the straight path to noise at level sigma, and the path's velocity."""
    noise = torch.randn_like(latents)
    sigma = sigma_B.view(-1, *(1,) * (latents.ndim - 1))
    return (1 - sigma) * latents + sigma * noise, noise - latents
