"""tokenizer.json from the metadata of a GGUF file."""

import sys

# Values of `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# The pre-tokenizers that `tokenizer.ggml.pre` names, as tokenizer.json spells them.
PRE_TOKENIZERS = {
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
}


def tokenizer_of(facts):
    kind = facts.tokenizer("model")
    if kind == "gpt2":
        parts = byte_level(facts)
    elif kind == "llama" and facts.architecture == "gemma3":
        parts = byte_fallback(facts)
    else:
        sys.exit(f"tokenizer {kind} of {facts.architecture} is not one that this script knows")
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(facts), **parts}


def added_tokens(facts):
    return [
        {
            "id": id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in (CONTROL, UNKNOWN),
        }
        for id, (token, kind) in enumerate(zip(facts.tokenizer("tokens"), facts.tokenizer("token_type"), strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]


def byte_level(facts):
    pre = facts.tokenizer("pre")
    if pre not in PRE_TOKENIZERS:
        sys.exit(f"pre-tokenizer {pre} is not one that this script knows")
    if odd := set(facts.tokenizer("token_type")) - {NORMAL, CONTROL, USER_DEFINED}:
        sys.exit(f"tokens of the kinds {sorted(odd)} are not ones that this script knows")
    merges = [merge.split(" ") for merge in facts.tokenizer("merges")]
    return {
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": bpe(facts, merges),
    }


def byte_fallback(facts):
    """Gemma's: SentencePiece's scores say in which order pieces are put together."""
    bos = facts.tokenizer("tokens")[facts.tokenizer("bos_token_id")]
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [facts.tokenizer("bos_token_id")], "tokens": [bos]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": bpe(facts, merges_by_score(facts), fuse_unk=True, byte_fallback=True),
    }


def merges_by_score(facts):
    """Every way to make a token of two, the best token first; of one token's ways the one with the lowest ids first."""
    tokens = facts.tokenizer("tokens")
    ids = {token: id for id, token in enumerate(tokens)}
    scored = []
    for token, score in zip(tokens, facts.tokenizer("scores"), strict=True):
        ways = [(token[:at], token[at:]) for at in range(1, len(token))]
        ways = [(left, right) for left, right in ways if left in ids and right in ids]
        scored += [(score, way) for way in sorted(ways, key=lambda way: (ids[way[0]], ids[way[1]]))]
    scored.sort(key=lambda entry: (-entry[0], -len(entry[1][0]), -len(entry[1][1])))
    return [list(way) for _, way in scored]


def bpe(facts, merges, fuse_unk=False, byte_fallback=False):
    tokens = facts.tokenizer("tokens")
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": tokens[facts.tokenizer("unknown_token_id")] if byte_fallback else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
        "vocab": {token: id for id, token in enumerate(tokens)},
        "merges": merges,
    }
