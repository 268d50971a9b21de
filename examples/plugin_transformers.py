"""Use fa_serve in a transformers script: after `import fa_serve`, attn_implementation="fa_serve" is a known name.

    python examples/plugin_transformers.py                              # the embedded model
    python examples/plugin_transformers.py --model Qwen/Qwen3-0.6B      # any model of transformers
    python examples/plugin_transformers.py --compare eager              # also with another attention; prints both times

The prompts differ in length, so the batch is padded on the left. The attention never reads the padding.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fa_serve
from fa_serve.demo import model_path

PROMPTS = ["What is 17 + 25?", "What is 3 + 99?", "What is 40 plus 2?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="hub name or folder; default: the embedded model")
    parser.add_argument("--compare", help="another attn_implementation to run as well, such as eager or sdpa")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation="fa_serve").to(device)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    texts = (
        tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True) if tokenizer.chat_template else PROMPTS
    )
    inputs = tokenizer(texts, padding=True, return_tensors="pt").to(device)

    def answer() -> list[str]:
        start = time.perf_counter()
        ids = model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)
        answers = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"--- {model.config._attn_implementation}, {time.perf_counter() - start:.2f} s")
        return answers

    ours = answer()
    for prompt, text in zip(PROMPTS, ours, strict=True):
        print(f"{prompt} -> {text}")
    if options.compare:
        # a loaded model is switched in place: to another implementation, and back to fa_serve
        model.set_attn_implementation(options.compare)
        print("the same answers" if answer() == ours else "other answers")
        fa_serve.patch(model)


if __name__ == "__main__":
    main()
