"""Flow matching (Lipman et al., arXiv 2210.02747): noisy latents, their velocity, and how noise levels are drawn."""

import torch
from torch import Tensor


def sample_sigma(batch: int, shift: float, device: torch.device) -> Tensor:
    """Noise levels (B,) in (0, 1): half uniform, half logit-normal, moved by the scheduler's shift
    (Esser et al., arXiv 2403.03206, section 5.3.2)."""
    uniform = torch.rand(batch, device=device)
    u_B = torch.where(torch.rand(batch, device=device) < 0.5, uniform, torch.randn(batch, device=device).sigmoid())
    return shift * u_B / (1 + (shift - 1) * u_B)


def noisy(latents: Tensor, sigma_B: Tensor) -> tuple[Tensor, Tensor]:
    """Latents on the straight path to noise at level sigma, and the path's velocity."""
    noise = torch.randn_like(latents)
    sigma = sigma_B.view(-1, *(1,) * (latents.ndim - 1))
    return (1 - sigma) * latents + sigma * noise, noise - latents
