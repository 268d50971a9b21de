"""The cells of bench_attention.py: heads, head sizes, lengths and options that are timed, and how their work is counted."""

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


def tflops(seqlen: int, causal: bool, ms: float, tokens: int = TOKENS, hidden: int = HIDDEN) -> float:
    """The rate of a forward pass over `tokens` tokens in sequences of `seqlen`, as FlashAttention's papers count it."""
    return 4 * tokens * seqlen * hidden * (0.5 if causal else 1.0) / ms * 1e-9
