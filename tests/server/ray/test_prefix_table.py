"""Which replicas have seen the beginning of a prompt."""

from fa_serve.server.ray.prefix_table import BLOCK_TOKENS, PrefixTable, prefix_keys

BOTH = {"a", "b"}


def test_keys_are_those_of_whole_blocks_and_of_all_before_them():
    prompt = list(range(3 * BLOCK_TOKENS + 5))
    keys = prefix_keys(prompt, "salt")
    assert len(set(keys)) == len(keys) == 3
    assert prefix_keys(prompt[: 2 * BLOCK_TOKENS], "salt") == keys[:2]
    assert prefix_keys([7, *prompt[1:]], "salt")[1:] != keys[1:], "a later block depends on the first one"
    assert not set(prefix_keys(prompt, None)) & set(keys)
    assert prefix_keys(prompt[: BLOCK_TOKENS - 1], None) == []


def test_the_longest_beginning_decides_among_replicas_that_run():
    table = PrefixTable()
    table.note([1, 2, 3], "a")
    table.note([1, 2, 9], "b")
    assert table.holders([1, 2, 3, 4], BOTH) == {"a"}
    assert table.holders([1, 2], BOTH) == BOTH
    assert table.holders([1, 2, 3], {"b"}) == {"b"}, "b has the first two blocks"
    assert table.holders([5], BOTH) == BOTH
    assert table.holders([], BOTH) == BOTH
    table.forget("a")
    assert table.holders([1, 2, 3], BOTH) == {"b"}


def test_the_oldest_blocks_are_forgotten_ends_of_prompts_first():
    table = PrefixTable(max_blocks=3)
    table.note([1, 2], "a")
    table.note([3, 4], "b")
    assert table.holders([1, 2], BOTH) == {"a"}, "the first block is left"
    assert table.holders([2], BOTH) == BOTH
    assert table.holders([3, 4], BOTH) == {"b"}
