"""Models of diffusers compute the same on the backend "fa_serve" and on diffusers' own backend "native"."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fa_serve.diffusers
from fa_serve import ParameterError, UnsupportedError
from fa_serve.diffusers import dispatched_attention
from fa_serve.testing import assert_matches_reference


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """diffusers' module of attention backends, with ours. `set_attention_backend` changes the process, which this undoes."""
    pytest.importorskip("diffusers")
    fa_serve.diffusers.register()
    from diffusers.models import attention_dispatch

    registry = attention_dispatch._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)
    return attention_dispatch


def test_the_name_is_a_member_like_others(dispatch: Any) -> None:
    names = dispatch.AttentionBackendName
    fa_serve.diffusers.register()
    assert [member.value for member in names].count("fa_serve") == 1
    member = names("fa_serve")
    assert member is names["FA_SERVE"] is names.FA_SERVE
    assert isinstance(member, names)
    assert (member.name, member.value, member) == ("FA_SERVE", "fa_serve", "fa_serve")
    assert dispatch._AttentionBackendRegistry._backends[member] is dispatched_attention


def test_an_old_diffusers_is_refused(dispatch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dispatch, "_AttentionBackendRegistry")
    with pytest.raises(UnsupportedError, match=r"does not support diffusers .*_AttentionBackendRegistry.*; install diffusers"):
        fa_serve.diffusers.register()


def flux(diffusers: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A diffusion transformer whose image and text tokens attend to each other in one sequence."""
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.zeros(7, 3),
    }
    return model, inputs


def wan(diffusers: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A diffusion transformer for videos, which attends to the text by cross attention."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(1, 9, 16),
        "timestep": torch.tensor([500]),
    }
    return model, inputs


@pytest.mark.parametrize("make", [flux, wan])
def test_models_agree_with_the_native_backend(make: Any, dispatch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import diffusers

    torch.manual_seed(0)
    model, inputs = make(diffusers)
    model.eval()
    calls = []
    member = dispatch.AttentionBackendName("fa_serve")

    def counted(*args: Any, **words: Any) -> Any:
        calls.append(words)
        return dispatched_attention(*args, **words)

    monkeypatch.setitem(dispatch._AttentionBackendRegistry._backends, member, counted)
    with torch.no_grad():
        model.set_attention_backend("native")
        expected = model(**inputs).sample
        assert calls == []
        model.set_attention_backend("fa_serve")
        found = model(**inputs).sample
    assert len(calls) >= 2
    assert torch.equal(found, expected)


MASKS = {
    "none": lambda: None,
    "padding": lambda: torch.tensor([[True] * 9, [True] * 5 + [False] * 4]),
    "queries-keys": lambda: torch.randn(6, 9),
    "heads": lambda: torch.randn(4, 6, 9),
    "all": lambda: torch.rand(2, 4, 6, 9) > 0.3,
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_mean_the_same(mask: str, dispatch: Any) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 6, 4, 8)
    k, v = torch.randn(2, 2, 9, 2, 8)
    words = {"attn_mask": MASKS[mask](), "scale": 0.4, "enable_gqa": True}
    found, expected = (dispatch.dispatch_attention_fn(q, k, v, **words, backend=name) for name in ("fa_serve", "native"))
    double = {name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in words.items()}
    exact = dispatch.dispatch_attention_fn(q.double(), k.double(), v.double(), **double, backend="native")
    assert_matches_reference(found, exact, expected)


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (4, 7), (7, 4)])
def test_causality_is_aligned_to_the_top_left(queries: int, keys: int, dispatch: Any) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, queries, 4, 8)
    k, v = torch.randn(2, 2, keys, 4, 8)
    found, expected = (dispatch.dispatch_attention_fn(q, k, v, is_causal=True, backend=name) for name in ("fa_serve", "native"))
    torch.testing.assert_close(found, expected)


def test_lse() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 6, 4, 8)
    out, lse = dispatched_attention(q, k, v, return_lse=True)
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) * 8**-0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, torch.einsum("bqhk,bkhd->bqhd", scores.softmax(-1), v))


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"_parallel_config": object()}, "parallel_config"),
        ({"is_causal": True, "attn_mask": torch.ones(6, 6, dtype=torch.bool)}, "attn_mask"),
    ],
)
def test_refused_arguments(words: dict[str, Any], field: str) -> None:
    q, k, v = torch.randn(3, 2, 6, 4, 8)
    with pytest.raises(ParameterError) as caught:
        dispatched_attention(q, k, v, **words)
    assert (caught.value.field, caught.value.code) == (field, "unsupported")
