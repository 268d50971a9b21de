"""Calls under the transforms of `torch.func`, whose results are those of `sdpa`, which PyTorch transforms by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

import fa_serve
from fa_serve import BlockLists
from fa_serve.testing import cu_seqlens, make_paged, make_qkv

Attend = Callable[..., Any]
SAMPLES = 3


def inputs(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of three samples of two sequences."""
    q, k, v = make_qkv(2 * SAMPLES, 9, 11, 4, 2, 16, dtype=dtype, device=device)
    draw = torch.Generator().manual_seed(3)
    return {
        **{name: x.unflatten(0, (SAMPLES, 2)) for name, x in zip("qkv", (q, k, v), strict=True)},
        "sinks": torch.randn(SAMPLES, 4, generator=draw).to(device),
        "mask": torch.randn(SAMPLES, 1, 4, 9, 11, generator=draw).to(device, dtype),
    }


def attention(given: dict[str, Tensor], backend: str, **options: Any) -> Any:
    return fa_serve.attention(**given, causal=True, softcap=4.0, backend=backend, **options)


def loss(given: dict[str, Tensor], backend: str) -> Tensor:
    out, lse = attention(given, backend, return_lse=True)
    return (out.float() ** 2).sum() + lse.clamp(min=-10).float().sum()


def of_sample(given: dict[str, Tensor], index: int, names: str) -> dict[str, Tensor]:
    return {name: given[name][index] for name in names.split()}


def packed(given: dict[str, Tensor], backend: str) -> Tensor:
    """Both sequences of a sample, packed, with a row behind the last one."""
    q, k, v = (given[name].flatten(0, 1) for name in "qkv")
    ends = {"cu_seqlens_q": cu_seqlens([9, 8], q.device), "cu_seqlens_k": cu_seqlens([11, 10], q.device)}
    return fa_serve.attention_varlen(q, k, v, **ends, max_seqlen_q=9, max_seqlen_k=11, causal=True, backend=backend)


def _grad(given: dict[str, Tensor], backend: str) -> Any:
    return grad(loss)(of_sample(given, 0, "q k v sinks mask"), backend)


def _jacrev(given: dict[str, Tensor], backend: str) -> Any:
    sample = of_sample(given, 0, "q k v sinks")
    small = {name: x[:1, :3] if x.dim() == 4 else x for name, x in sample.items()}
    return jacrev(lambda some: attention(some, backend).float().sum(-1))(small)


def _vmap(given: dict[str, Tensor], backend: str) -> Any:
    """q and the mask have samples, k and v are shared."""
    shared = of_sample(given, 0, "k v")
    return vmap(lambda q, mask: attention({"q": q, "mask": mask, **shared}, backend, return_lse=True))(
        given["q"], given["mask"]
    )


def _vmap_of_sinks(given: dict[str, Tensor], backend: str) -> Any:
    """Sinks are the same for all sequences of a call, so samples are computed one after the other."""
    shared = of_sample(given, 0, "q k v")
    return vmap(lambda sinks: attention({"sinks": sinks, **shared}, backend))(given["sinks"])


def _last_dimension(given: dict[str, Tensor], backend: str) -> Any:
    moved = {name: given[name].movedim(0, -1) for name in "qkv"}
    return vmap(lambda some: attention(some, backend), in_dims=-1, out_dims=1)(moved)


def _per_sample(given: dict[str, Tensor], backend: str) -> Any:
    return vmap(grad(loss), in_dims=(0, None))({name: given[name] for name in "qkv"}, backend)


def _per_sample_of_everything(given: dict[str, Tensor], backend: str) -> Any:
    return vmap(grad(loss), in_dims=(0, None))(given, backend)


def _per_sample_of_shared(given: dict[str, Tensor], backend: str) -> Any:
    """Gradients of parameters that all samples share, as differential privacy needs them."""
    draw = torch.Generator().manual_seed(4)
    weight = torch.randn(16, 16, generator=draw).to(given["q"]) / 4
    sinks = given["sinks"][0]

    def of_parameters(weight: Tensor, sinks: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return loss({"q": q @ weight, "k": k @ weight, "v": v, "sinks": sinks}, backend)

    per_sample = vmap(grad(of_parameters, argnums=(0, 1)), in_dims=(None, None, 0, 0, 0))
    return per_sample(weight, sinks, given["q"], given["k"], given["v"])


def _grad_of_vmap(given: dict[str, Tensor], backend: str) -> Any:
    """The gradient of k and v is a sum over the samples that share them."""

    def total(q: Tensor, shared: dict[str, Tensor], mask: Tensor) -> Tensor:
        return vmap(lambda q, mask: loss({"q": q, "mask": mask, **shared}, backend))(q, mask).sum()

    return grad(total, argnums=(0, 1, 2))(given["q"], of_sample(given, 0, "k v"), given["mask"])


def _nested(given: dict[str, Tensor], backend: str) -> Any:
    shared = of_sample(given, 0, "k v")
    return vmap(lambda q: vmap(lambda k: attention({"q": q, "k": k, "v": shared["v"]}, backend))(given["k"]))(given["q"])


def _varlen(given: dict[str, Tensor], backend: str) -> Any:
    return vmap(grad(lambda some: (packed(some, backend).float() ** 2).sum()))({name: given[name] for name in "qkv"})


def _leaves(given: dict[str, Tensor], backend: str) -> Any:
    """Autograd itself around vmap."""
    leaves = {name: given[name].clone().requires_grad_() for name in "qkv"}
    out = vmap(lambda some: attention(some, backend))(leaves)
    return torch.autograd.grad((out.float() ** 2).sum(), list(leaves.values()))


CASES = [
    _grad,
    _jacrev,
    _vmap,
    _vmap_of_sinks,
    _last_dimension,
    _per_sample,
    _per_sample_of_everything,
    _per_sample_of_shared,
    _grad_of_vmap,
    _nested,
    _varlen,
    _leaves,
]


def params() -> list[Any]:
    return [pytest.param(case, id=case.__name__[1:]) for case in CASES]


def check_transform(case: Attend, backend: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """The sdpa backend of a CPU in float32 is what all results are compared with."""
    given = inputs("cpu", torch.float32)
    given = {name: x.to(device, dtype if name != "sinks" else torch.float32) for name, x in given.items()}
    expected = case({name: x.float().cpu() for name, x in given.items()}, "sdpa")
    actual = case(given, backend)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    leaves = list(zip(*(torch.utils._pytree.tree_leaves(x) for x in (actual, expected)), strict=True))
    assert leaves
    for ours, theirs in leaves:
        torch.testing.assert_close(ours.float().cpu(), theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())


def check_other_calls(backend: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """Samples of calls without gradients: pages and lists of blocks are those of all samples."""
    q, k, v = make_qkv(2, 70, 70, 4, 2, 16, dtype=dtype, device=device)
    lists = BlockLists.from_blocks(torch.ones(1, 1, 2, 2, dtype=torch.bool, device=device).tril(), (64, 64))
    sparse = {"block_mask": lists, "causal": True}
    expected = [fa_serve.attention(q[i : i + 1], k[:1], v[:1], **sparse, backend=backend) for i in range(2)]
    found = vmap(lambda q: fa_serve.attention(q[None], k[:1], v[:1], **sparse, backend=backend))(q)
    torch.testing.assert_close(found, torch.stack(expected))
    k_cache, v_cache, table, used = make_paged([k[0]], [v[0]], 16)
    pages = {"block_table": table, "seqused_k": used, "cu_seqlens_q": cu_seqlens([70], device), "max_seqlen_q": 70}
    expected = [fa_serve.attention_paged(x, k_cache, v_cache, **pages, backend=backend) for x in q]
    found = vmap(lambda q: fa_serve.attention_paged(q, k_cache, v_cache, **pages, backend=backend))(q)
    torch.testing.assert_close(found, torch.stack(expected))


def check_refusals(backend: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """What kernels do not have is refused in a sentence of fa_serve, and never computed without the derivative."""
    q, k, v = make_qkv(1, 5, 7, 4, 2, 16, dtype=dtype, device=device)

    def attend(q: Tensor) -> Tensor:
        return fa_serve.attention(q, k, v, backend=backend).float().pow(2).sum()

    tangent = torch.ones_like(q)
    with pytest.raises(fa_serve.UnsupportedError, match="in reverse mode only"):
        torch.func.jvp(attend, (q,), (tangent,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, tangent)
        with pytest.raises(fa_serve.UnsupportedError, match="in reverse mode only"):
            attend(dual)
        attend(q)
    with pytest.raises(fa_serve.UnsupportedError, match="in reverse mode only"):
        torch.func.jacfwd(attend)(q)
    with pytest.raises(fa_serve.UnsupportedError, match="in reverse mode only"):
        torch.func.hessian(attend)(q)
    with pytest.raises(fa_serve.UnsupportedError, match="cannot be differentiated again"):
        grad(lambda q: grad(attend)(q).sum())(q)
    with pytest.raises(fa_serve.UnsupportedError, match="in reverse mode only"):
        torch.func.jvp(grad(attend), (q,), (tangent,))
    k_cache, v_cache, table, used = make_paged([k[0]], [v[0]], 16)
    pages = {"block_table": table, "seqused_k": used, "cu_seqlens_q": cu_seqlens([5], device), "max_seqlen_q": 5}
    with pytest.raises(fa_serve.UnsupportedError, match=r"through (a paged cache|pages)"):
        grad(lambda q: fa_serve.attention_paged(q, k_cache, v_cache, **pages, backend=backend).sum())(q[0])
    leaf = q.clone().requires_grad_()
    out = fa_serve.attention(leaf, k, v, backend=backend)
    with pytest.raises(fa_serve.UnsupportedError, match="one gradient of the output at a time"):
        torch.autograd.grad(out, leaf, torch.stack([out, out]), is_grads_batched=True)
    slots = torch.arange(7, device=device)
    with pytest.raises(fa_serve.UnsupportedError, match="store_kv writes its caches in place"):
        vmap(lambda k: fa_serve.store_kv(k, k, k_cache, v_cache, slots, backend=backend))(k)
    fa_serve.store_kv(k[0], v[0], k_cache, v_cache, slots, backend=backend)
