"""The adapter to transformers: `attn_implementation="fa_serve"`, `experts_implementation="fa_serve"` and the engine's forward.

    import fa_serve
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa_serve")

transformers asks an implementation for two functions. The mask function (`masks`) turns a description such as "causal, a
window of 128, this padding" into the mask that the attention function takes. The attention function (`attention`) gets query,
key, value, that mask and further arguments of the model. A mask is an `ImplicitMask` if a kernel can apply it from a few
numbers and skip the keys that no query sees, as with windows, chunks, padding and packed sequences. For image blocks and users'
masks it is a tensor of four dimensions, which is applied as it is.

    adapter/           attention in a model of transformers
        register       makes both functions known to transformers; `patch` switches a loaded model
        models         decides which models fa_serve serves, and refuses the others when they are loaded
        mask_patterns  recognises the pattern of a mask function of transformers
        masks          ImplicitMask, and the mask function
        translate      transformers' arguments -> one LayerCall; the one place that knows which keys a call sees
        attention      the attention function: sends a LayerCall to a kernel or to the batch that rides along
        composites     how a model with towers is loaded, and which parts of it fa_serve serves
        paged          the engine's forward over packed tokens and a paged cache
        probe          what each layer keeps of a sequence in that forward, or why a model cannot run in it
        step_cache     the cache that layers with a recurrent state get in that forward
        state_modules  which modules keep such a state, and how their recurrences reach `fa_serve.ops`
        indexers       which modules choose keys for a query, and how they choose from a paged cache
        short_choices  which modules choose blocks of keys, and up to which length they choose all of them
        gathered_keys  models that compute their attention or its bias themselves, in the engine's forward;
                       gathered_keys_proof: whether that is right
        own_masks      models that make their masks themselves
        continuous     transformers' own continuous batching (`generate_batch`)
    surgery/           everything that replaces a module of a model
        fuse/          decoder layers, computed by a few kernels
        divide/        which part of each layer a rank of tensor parallelism keeps, and the division
        experts/       mixtures of experts, computed by one function
        proof.py       the one proof that a replacement computes the same
        quantised/     the layers of a quantised checkpoint, and the experts among them
    weights/           how checkpoints keep quantised weights
    latent_layers.py   which layers have latent attention, and what is cached for them
    layer_kinds.py     how few of a model's layers show all kinds of its layers
    hidden_states.py   reads a model's hidden states between its layers
    live_model.py      a model that is being trained in this process
    exact_forward.py   the forward of training, bit for bit what the engine computes
    eagle3.py          a draft head that guesses tokens from hidden states; imported only if one is used
    info.py            what a model asks of attention, from its config alone

Left out: dropout in attention, attention weights as an output, and caches that hold anything but keys and values.
"""

try:
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__).release < (5, 17):
        raise ImportError(f"found {transformers.__version__}")
except ImportError as error:
    raise ImportError(
        f"fa_serve's adapter needs transformers >= 5.17: {error}. Install it with pip install 'transformers>=5.17'"
    ) from error

from fa_serve.hf.adapter.attention import attention_forward
from fa_serve.hf.adapter.composites import auto_class, make_served, text_model
from fa_serve.hf.adapter.gathered_keys import gathers_keys
from fa_serve.hf.adapter.masks import mask_forward
from fa_serve.hf.adapter.models import NAME
from fa_serve.hf.adapter.paged import OneSequence, PagedBatch, TwoWayBlock, paged_forward, paged_output
from fa_serve.hf.adapter.probe import ModelLayers, attention_backends, check_attention_precision, check_model, model_layers
from fa_serve.hf.adapter.register import patch, patch_parts, register
from fa_serve.hf.adapter.short_choices import length_limit
from fa_serve.hf.adapter.step_cache import PagedStates, StateKey, take_layer_idx
from fa_serve.hf.adapter.translate import AttendsBatch, LayerCall
from fa_serve.hf.exact_forward import ExactForward, exact, token_logprobs
from fa_serve.hf.hidden_states import HiddenStateReader
from fa_serve.hf.layer_kinds import few_layers
from fa_serve.hf.live_model import (
    Addresses,
    ModelState,
    adapter_switches,
    check_live,
    forwards_with_copies,
    parameters_in,
    trained_model,
    unwrap_calls,
)
from fa_serve.hf.surgery.divide.plan import plan_division
from fa_serve.hf.surgery.divide.weights import PartOfSum, divide_model, vocab_size
from fa_serve.hf.surgery.experts.mixtures import expert_modules, experts_forward, take_experts
from fa_serve.hf.surgery.experts.scaled import ScaledExperts, take_scaled_experts
from fa_serve.hf.surgery.indexers import patch_indexers
from fa_serve.hf.surgery.states import patch_states

__all__ = [
    "NAME",
    "Addresses",
    "AttendsBatch",
    "ExactForward",
    "HiddenStateReader",
    "LayerCall",
    "ModelLayers",
    "ModelState",
    "OneSequence",
    "PagedBatch",
    "PagedStates",
    "PartOfSum",
    "ScaledExperts",
    "StateKey",
    "TwoWayBlock",
    "adapter_switches",
    "attention_backends",
    "attention_forward",
    "auto_class",
    "check_attention_precision",
    "check_live",
    "check_model",
    "divide_model",
    "exact",
    "expert_modules",
    "experts_forward",
    "few_layers",
    "forwards_with_copies",
    "gathers_keys",
    "length_limit",
    "make_served",
    "mask_forward",
    "model_layers",
    "paged_forward",
    "paged_output",
    "parameters_in",
    "patch",
    "patch_indexers",
    "patch_parts",
    "patch_states",
    "plan_division",
    "register",
    "take_experts",
    "take_layer_idx",
    "take_scaled_experts",
    "text_model",
    "token_logprobs",
    "trained_model",
    "unwrap_calls",
    "vocab_size",
]

register()
