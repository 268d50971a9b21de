"""The cells of bench_attention.py: heads, head sizes, lengths and options that are timed, and how their work is counted."""

from __future__ import annotations

from dataclasses import dataclass, replace

TOKENS = 16384
HIDDEN = 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
WINDOWS = (128, 512, 1024, 4096)
PAGED_HEADS = ((32, 8, 128), (32, 32, 128), (64, 8, 128), (16, 8, 128), (64, 8, 64))
DECODE_CELLS = (
    (1, 1024),
    (1, 16384),
    (1, 131072),
    (8, 8192),
    (32, 4096),
    (64, 8192),
    (128, 1024),
    (256, 512),
    (256, 4096),
)
# sequences that decode, each with 4096 keys; chunks of prompts, their tokens, keys before each chunk
MIXED_CELLS = (
    (32, 1, 2048, 0),
    (32, 1, 2048, 4096),
    (8, 1, 512, 8192),
    (40, 4, 512, 4096),
    (64, 8, 256, 2048),
    (128, 2, 1024, 16384),
    (44, 4, 300, 5000),
)

# name, query heads, KV heads, head_dim, head_dim_v, window (left, right), softcap
MODELS = (
    ("llama-3.1-8b", 32, 8, 128, 128, (-1, 0), 0.0),
    ("qwen3-32b", 64, 8, 128, 128, (-1, 0), 0.0),
    ("qwen2.5-7b", 28, 4, 128, 128, (-1, 0), 0.0),
    ("gemma-2-9b", 16, 8, 256, 256, (-1, 0), 50.0),
    ("gemma-2-9b-local", 16, 8, 256, 256, (4095, 0), 50.0),
    ("gemma-3-4b", 8, 4, 256, 256, (-1, 0), 0.0),
    ("gemma-3-4b-local", 8, 4, 256, 256, (1023, 0), 0.0),
    ("gemma-4-26b", 16, 2, 512, 512, (-1, 0), 0.0),
    ("phi-3-mini", 32, 32, 96, 96, (-1, 0), 0.0),
    ("gpt-neox-20b", 64, 64, 96, 96, (-1, 0), 0.0),
    ("stablelm-3b", 32, 32, 80, 80, (-1, 0), 0.0),
    ("deepseek-v3", 32, 32, 192, 128, (-1, 0), 0.0),
    ("nemotron-192", 32, 8, 192, 192, (-1, 0), 0.0),
    ("falcon-7b", 71, 1, 64, 64, (-1, 0), 0.0),
    ("gpt-oss-20b", 64, 8, 64, 64, (-1, 0), 0.0),
    ("gpt-oss-20b-local", 64, 8, 64, 64, (127, 0), 0.0),
    ("vit-l", 16, 16, 64, 64, (-1, -1), 0.0),
    ("siglip-so400m", 16, 16, 72, 72, (-1, -1), 0.0),
    ("bert-large", 16, 16, 64, 64, (-1, -1), 0.0),
    ("modernbert-local", 12, 12, 64, 64, (64, 64), 0.0),
    ("whisper-large", 20, 20, 64, 64, (-1, -1), 0.0),
)
MODELS_WITH_SINKS = {"gpt-oss-20b", "gpt-oss-20b-local"}

CHUNK_HEADS = ((32, 8, 128), (16, 8, 128), (16, 2, 128), (64, 8, 64))
# queries, keys before them, sequences
CHUNK_CELLS = (
    (64, 4096, 1),
    (128, 32768, 1),
    (256, 1024, 1),
    (256, 4096, 1),
    (256, 4096, 4),
    (512, 8192, 1),
    (512, 8192, 2),
    (1024, 4096, 2),
    (2048, 16384, 1),
    (2048, 65536, 1),
    # last tiles that would be nearly empty
    (300, 5000, 1),
    (300, 5000, 4),
    (160, 12000, 1),
)
VERIFY_HEADS = ((32, 8, 128), (64, 8, 128), (32, 32, 128), (28, 4, 128), (64, 8, 64))
# queries, keys, sequences
VERIFY_CELLS = ((2, 4096, 32), (4, 4096, 32), (4, 1024, 128), (8, 4096, 32), (8, 8192, 1), (16, 2048, 16))

# query heads of DeepSeek V3, Kimi K2 and DeepSeek V2 Lite
LATENT_HEADS = (128, 64, 16)
# queries, keys, sequences: decoding, verified drafts, a chunk behind cached keys
LATENT_CELLS = ((1, 8192, 64), (1, 131072, 1), (1, 1024, 128), (4, 4096, 32), (2048, 18432, 1))
LATENT_FLOAT8_CELLS = LATENT_CELLS[:3]

SPARSE_SEQLENS = (16384, 65536)
SPARSE_PARTS = (0.1, 0.25)


@dataclass(frozen=True)
class DenseCell:
    """One dense call of a class of `DENSE_CLASSES`; pattern and extent: of its mask, see `dense_problem.make_mask`"""

    name: str
    batch: int
    seqlen_q: int
    heads: int
    head_dim: int
    keys: int = 0
    kv: int = 0
    causal: bool = False
    pattern: str = ""
    extent: int = 0

    @property
    def seqlen_k(self) -> int:
        return self.keys or self.seqlen_q

    @property
    def kv_heads(self) -> int:
        return self.kv or self.heads

    def tiny(self) -> DenseCell:
        """The same cell for a CPU: a few heads of 32, and lengths of up to a few hundred."""
        kv = min(self.kv_heads, 2)
        heads = kv * min(self.heads // self.kv_heads, 2)
        lengths = {"seqlen_q": min(self.seqlen_q, 300), "keys": min(self.seqlen_k, 280 if self.keys else 300)}
        extent = min(self.extent, 140)
        return replace(self, batch=min(self.batch, 2), heads=heads, kv=kv, head_dim=32, extent=extent, **lengths)


DENSE_CLASSES = {
    # masks of elements; the name says the pattern and its extent
    "masks": (
        DenseCell("prefix_2000_of_8192_32/8_d128", 1, 8192, 32, 128, kv=8, pattern="prefix", extent=2000),
        DenseCell("prefix_700_of_2048_x4_16/8_d128", 4, 2048, 16, 128, kv=8, pattern="prefix", extent=700),
        DenseCell("documents_1000_of_8192_32/8_d128", 1, 8192, 32, 128, kv=8, pattern="documents", extent=1000),
        DenseCell("documents_300_of_16384_16_d64", 1, 16384, 16, 64, pattern="documents", extent=300),
        DenseCell("images_256_of_4096_16/8_d256", 1, 4096, 16, 256, kv=8, pattern="images", extent=256),
        DenseCell("padding_of_4096_x4_16_d64", 4, 4096, 16, 64, pattern="padding"),
        DenseCell("blocks_128_of_8192_16_d128", 1, 8192, 16, 128, pattern="blocks", extent=128),
        DenseCell("t5_bias_of_2048_x4_16_d64", 4, 2048, 16, 64, pattern="bias"),
        DenseCell("t5_bias_of_512_x16_12_d64", 16, 512, 12, 64, pattern="bias"),
    ),
    # forward and backward
    "train": (
        DenseCell("gemma_16/8_d256_4096_x2", 2, 4096, 16, 256, kv=8, causal=True),
        DenseCell("gemma_8/4_d256_8192", 1, 8192, 8, 256, kv=4, causal=True),
        DenseCell("nemotron_32/8_d192_4096", 1, 4096, 32, 192, kv=8, causal=True),
        DenseCell("phi_32_d96_2048_x4", 4, 2048, 32, 96, causal=True),
        DenseCell("llama_32/8_d128_4096_x2", 2, 4096, 32, 128, kv=8, causal=True),
        DenseCell("llama_32/8_d128_16384", 1, 16384, 32, 128, kv=8, causal=True),
        DenseCell("gpt_16_d64_2048_x8", 8, 2048, 16, 64, causal=True),
        DenseCell("bert_16_d64_512_x32", 32, 512, 16, 64),
        DenseCell("prefix_16/8_d128_4096", 1, 4096, 16, 128, kv=8, pattern="prefix", extent=1000),
    ),
    "encoder": (
        DenseCell("bert_large_512_x32", 32, 512, 16, 64),
        DenseCell("vit_large_577_x32", 32, 577, 16, 64),
        DenseCell("siglip_729_x32", 32, 729, 16, 72),
        DenseCell("whisper_1500_x8", 8, 1500, 20, 64),
        DenseCell("vit_huge_257_x64", 64, 257, 16, 80),
        DenseCell("modernbert_8192", 1, 8192, 12, 64),
    ),
    # queries of a decoder, or of a picture, over the keys of an encoder
    "cross": (
        DenseCell("whisper_1_of_1500_x16", 16, 1, 20, 64, keys=1500),
        DenseCell("whisper_1_of_1500_x64", 64, 1, 20, 64, keys=1500),
        DenseCell("whisper_5_of_1500_x16", 16, 5, 20, 64, keys=1500),
        DenseCell("whisper_448_of_1500_x8", 8, 448, 20, 64, keys=1500),
        DenseCell("sdxl_4096_of_77_x4", 4, 4096, 10, 64, keys=77),
        DenseCell("wan_16384_of_512_12_d128", 1, 16384, 12, 128, keys=512),
    ),
    "diffusion": (
        DenseCell("flux_4608_24_d128", 1, 4608, 24, 128),
        DenseCell("sd3_4429_x2_24_d64", 2, 4429, 24, 64),
        DenseCell("sdxl_4096_x4_10_d64", 4, 4096, 10, 64),
        DenseCell("wan_16384_12_d128", 1, 16384, 12, 128),
        DenseCell("hunyuan_11520_24_d128", 1, 11520, 24, 128),
    ),
    "wide": (
        DenseCell("gemma4_16/2_d512_8192", 1, 8192, 16, 512, kv=2, causal=True),
        DenseCell("gemma4_16/2_d512_16384", 1, 16384, 16, 512, kv=2, causal=True),
        DenseCell("gemma4_8/1_d512_2048_x4", 4, 2048, 8, 512, kv=1, causal=True),
        DenseCell("full_4_d512_4096", 1, 4096, 4, 512),
        DenseCell("causal_8/4_d320_8192", 1, 8192, 8, 320, kv=4, causal=True),
        DenseCell("causal_16/8_d256_8192", 1, 8192, 16, 256, kv=8, causal=True),
    ),
}


def tflops(seqlen: int, causal: bool, ms: float, tokens: int = TOKENS, hidden: int = HIDDEN) -> float:
    """The rate of a forward pass over `tokens` tokens in sequences of `seqlen`, as FlashAttention's papers count it."""
    return 4 * tokens * seqlen * hidden * (0.5 if causal else 1.0) / ms * 1e-9
