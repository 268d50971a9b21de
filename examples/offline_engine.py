"""Generate for many prompts at once, without a server.

    python examples/offline_engine.py                       # the embedded model
    python examples/offline_engine.py Qwen/Qwen3-0.6B       # any causal model that fa_serve supports

All prompts run in one batch over one paged cache. Greedy and sampled requests mix freely, and a common prefix of prompts is
computed once.
"""

import argparse

from fa_serve.engine import Engine, EngineConfig, SamplingParams, StructuredOutput

HEAD = '"""Helpers for reading files."""\n\nimport os\n\n'
PROMPTS = [HEAD + f"def {name}(path):\n" for name in ("read_lines", "count_words", "file_size")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="hub name or local folder; without it, the embedded model")
    engine = Engine(EngineConfig(model=parser.parse_args().model, max_num_seqs=16))

    greedy = SamplingParams(max_tokens=48, temperature=0.0, stop=("\ndef ",))
    sampled = SamplingParams(max_tokens=48, temperature=0.8, top_p=0.9, seed=1, stop=("\ndef ",))
    params = [greedy] * len(PROMPTS) + [sampled] * len(PROMPTS)
    for prompt, completion in zip(PROMPTS * 2, engine.generate(PROMPTS * 2, params), strict=True):
        print(f"--- {completion.finish_reason}, {completion.num_cached_tokens} tokens of the prompt from the cache")
        print(prompt.removeprefix(HEAD) + completion.text)

    # structured output: the answer follows the schema, whatever the model would write otherwise
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    structured = SamplingParams(max_tokens=48, temperature=0.0, structured=StructuredOutput(json_schema=schema))
    print("--- structured", engine.generate(["n = 3 as JSON: "], structured)[0].text, sep="\n")

    # one request, streamed step by step
    engine.add_request("stream", PROMPTS[0], sampled)
    print("--- streamed")
    while engine.has_unfinished():
        for output in engine.step():
            print(output.text, end="", flush=True)
    stats = engine.stats()
    print(f"\n--- {stats.num_output_tokens} tokens in {stats.num_steps} steps")


if __name__ == "__main__":
    main()
