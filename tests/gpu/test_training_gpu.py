"""Training on the GPU: the embedded model ends where it ends with eager attention, in mixed precision."""

from __future__ import annotations

import pytest
import torch
from packed_training import packed_training_gradients
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from fa_serve.demo import model_path

STEPS = 200


def losses(name: str, seed: int) -> list[float]:
    """The losses of the embedded model, which learns progressions from padded batches; `seed` draws these."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_path(), attn_implementation=name, dtype=torch.float32).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(STEPS):
        first, step = torch.randint(1, 40, (2, 8, 1), generator=generator)
        ids = (first + step * torch.arange(150)) % 199
        mask = (torch.arange(150) < torch.randint(20, 151, (8, 1), generator=generator)).long()
        labels = ids.masked_fill(mask == 0, -100)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids.cuda(), attention_mask=mask.cuda(), labels=labels.cuda()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def test_200_steps_end_where_eager_attention_ends() -> None:
    """The noise is what other batches change."""
    eager = losses("eager", 0)
    runs = (eager, losses("fa_serve", 0), losses("eager", 1))
    last_eager, last_ours, last_other = (sum(found[-40:]) / 40 for found in runs)
    assert last_eager < 0.5 * sum(eager[:5]) / 5, "it has learned"
    assert abs(last_ours - last_eager) <= max(0.02 * last_eager, abs(last_other - last_eager))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_a_model_are_those_of_eager_attention(dtype: torch.dtype) -> None:
    ids = torch.randint(1, 300, (2, 70), generator=torch.Generator().manual_seed(2)).cuda()
    gradients = []
    for name, precision in (("eager", torch.float32), ("eager", dtype), ("fa_serve", dtype)):
        model = make_model().to("cuda", precision).train()
        model.set_attn_implementation(name)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([p.grad.float() for p in model.parameters()])
    for exact, eager, ours in zip(*gradients, strict=True):
        allowed = 2 * (eager - exact).norm() + 1e-3 * exact.norm()
        assert (ours - exact).norm() <= allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_packed_batch_with_rows_behind_its_last_sequence_has_the_gradients_of_one_without(dtype: torch.dtype) -> None:
    """In bfloat16 the Hopper kernels compute, where there are any, and in float32 the portable ones."""
    padded, plain = packed_training_gradients("cuda", dtype)
    for ours, expected in zip(padded, plain, strict=True):
        assert torch.isfinite(ours).all()
        allowed = (2e-2 if dtype == torch.bfloat16 else 1e-4) * expected.norm() + 1e-6
        assert (ours - expected).norm() <= allowed
