"""The bar that transformers draws for weights is replaced by counts; other bars stay, and so does an earlier hook."""

from transformers import AutoModelForCausalLM
from transformers.utils import logging

from fa_serve.demo import model_path
from fa_serve.hf.weights.progress import TITLE, weights_counted


def test_each_tensor_of_a_checkpoint_is_counted(capsys):
    seen = []
    with weights_counted(lambda done, total: seen.append((done, total))):
        AutoModelForCausalLM.from_pretrained(model_path())
    total = seen[0][1]
    assert seen == [(done, total) for done in range(1, total + 1)]
    assert total > 10
    assert TITLE not in capsys.readouterr().err
    AutoModelForCausalLM.from_pretrained(model_path())
    assert len(seen) == total, "the hook is gone"


def test_a_bar_with_updates():
    seen = []
    with weights_counted(lambda done, total: seen.append((done, total))), logging.tqdm(desc=TITLE, total=5) as bar:
        bar.update(2)
        bar.update()
        bar.set_postfix(shard=1)
    assert seen == [(2, 5), (3, 5)]


def test_other_bars_and_an_earlier_hook_stay():
    seen = []
    before = logging.set_tqdm_hook(lambda factory, args, options: seen.append(options["desc"]))
    try:
        with weights_counted(lambda done, total: None):
            logging.tqdm([1], desc="other")
        logging.tqdm([1], desc=TITLE)
    finally:
        logging.set_tqdm_hook(before)
    assert seen == ["other", TITLE]
