"""Fine-tune a model with LoRA: the Trainer of transformers, adapters of PEFT, attention and its gradients from fa_serve.

    pip install peft                                                   # brings accelerate, which Trainer needs
    python examples/fine_tune_lora.py                                  # one to two minutes on two cores
    python examples/fine_tune_lora.py --model Qwen/Qwen3-0.6B --steps 60

The embedded model adds two numbers below 100 and declines to subtract. Here it learns to subtract from pairs that addition has
taught it, and is asked about pairs that it has never seen. LoRA (Hu et al. 2021) freezes the model and trains two narrow
matrices beside each projection. Nothing here is special to fa_serve but the name of the attention: the batches are padded, the
forward pass keeps out and lse, and the backward pass recomputes the scores (docs/kernels/backward.md). Nothing is saved
without `--save FOLDER`, whose adapter `fa-serve serve --lora minus=FOLDER` serves (docs/lora.md).
"""

import argparse
import random
import time

import torch
from demo_data import number_pairs
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

import fa_serve  # noqa: F401  # `attn_implementation="fa_serve"` is a known name from here on
from fa_serve.demo import model_path

QUESTION = "What is {a} - {b}?"
ANSWER = "{a} - {b} = {c}."
ASKED = 100  # pairs that the model is asked about in the end
IGNORED = -100  # labels of tokens that are not learned


def differences(split: str) -> list[tuple[int, int]]:
    """The pairs (a, b) of a split of the demo's data with a >= b, in random order."""
    pairs = [(a, b) for a, b in number_pairs(split) if a >= b]
    random.Random(0).shuffle(pairs)
    return pairs


def ask(tokenizer: PreTrainedTokenizerBase, a: int, b: int) -> str:
    """The prompt, up to the beginning of the answer."""
    question = [{"role": "user", "content": QUESTION.format(a=a, b=b)}]
    return str(tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True))


def example(tokenizer: PreTrainedTokenizerBase, a: int, b: int) -> dict[str, list[int]]:
    """One row of training data: only the answer is learned."""
    prompt = tokenizer(ask(tokenizer, a, b)).input_ids
    answer = [*tokenizer(ANSWER.format(a=a, b=b, c=a - b)).input_ids, tokenizer.eos_token_id]
    return {"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer}


def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: list[tuple[int, int]]) -> list[str]:
    inputs = tokenizer([ask(tokenizer, a, b) for a, b in pairs], padding=True, padding_side="left", return_tensors="pt")
    ids = model.generate(**inputs.to(model.device), max_new_tokens=24, do_sample=False)
    return list(tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True))


def show(when: str, found: list[str], pairs: list[tuple[int, int]]) -> None:
    for text, (a, b) in zip(found, pairs, strict=False):
        print(f"{when}: {QUESTION.format(a=a, b=b)} -> {text}")


def main(arguments: list[str] | None = None) -> list[float]:
    """Returns the losses that the trainer has logged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="hub name or folder; default: the embedded model")
    parser.add_argument("--attention", default="fa_serve", help="attn_implementation, for comparison with eager or sdpa")
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step")
    parser.add_argument("--rank", type=int, default=32, help="columns of LoRA's matrices")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--save", metavar="FOLDER", help="where the adapter is written, for fa-serve serve --lora NAME=FOLDER")
    options = parser.parse_args(arguments)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    set_seed(0)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation=options.attention)
    unseen = differences("test")[:ASKED]
    show("before", answers(model, tokenizer, unseen[:3]), unseen)

    lora = LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    trained, total = model.get_nb_trainable_parameters()
    print(f"LoRA trains {trained:,} of {total:,} parameters")
    trainer = Trainer(
        model,
        TrainingArguments(
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=options.steps // 10,
            logging_steps=max(options.steps // 4, 1),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=[example(tokenizer, a, b) for a, b in differences("train")],
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED),
    )
    start = time.perf_counter()
    trainer.train()
    print(f"{options.steps} steps in {time.perf_counter() - start:.0f} s")

    if options.save:
        model.save_pretrained(options.save)
    merged = model.merge_and_unload().eval()
    found = answers(merged, tokenizer, unseen)
    show("after", found[:3], unseen)
    right = sum(text == ANSWER.format(a=a, b=b, c=a - b) for text, (a, b) in zip(found, unseen, strict=True))
    print(f"{right} of {len(unseen)} differences that it was never shown are right")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
