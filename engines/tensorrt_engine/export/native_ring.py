"""TensorRT's own multi-device attention: an ``Attention`` node that spans the ranks (compute capability 10.0 on)."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.core.kernel import Kernel, Prefix
from engines.core.layout import TokenLayout
from engines.parallel.attention.local import as_many_as
from engines.parallel.communication.mesh import Team


@torch.library.custom_op("troupe::ring_attention", mutates_args=())
def ring_attention(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, num_ranks: int) -> Tensor:
    """Marks attention over the keys of all ranks; TensorRT runs it, torch never does."""
    raise NotImplementedError("troupe::ring_attention only runs inside TensorRT")


@ring_attention.register_fake
def _(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, num_ranks: int) -> Tensor:
    return torch.empty_like(q_BHLD, memory_format=torch.contiguous_format)


RING_ATTENTION = torch.ops.troupe.ring_attention.default


def native_ring_kernel(team: Team, layout: TokenLayout) -> Kernel:
    """Returns the kernel, which takes no mask and no prefix.

    Raises ValueError for tokens that do not divide: the node has no way to leave padding out.
    """
    if layout.valid_rows(0, layout.num_chunks) is not None:
        raise ValueError(
            f"TensorRT's ring over {team.ring.size} ranks needs token numbers that divide by it, not "
            f"{dict(layout.lengths)}: choose another size, or ulysses or allgather_kv"
        )

    def kernel(
        q_BLHD: Tensor,
        k_BLGD: Tensor,
        v_BLGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert mask_BM is None
        assert prefix is None
        several = (q_BLHD, *as_many_as(q_BLHD, k_BLGD, v_BLGD))
        q_BHLD, k_BHLD, v_BHLD = (x.transpose(1, 2).contiguous() for x in several)
        out_BHLD: Tensor = RING_ATTENTION(q_BHLD, k_BHLD, v_BHLD, team.ring.size)
        return out_BHLD.transpose(1, 2), q_BLHD.new_empty(0)

    return kernel
