"""The tiny byte-complete tokenizer of the reasoner. Standard library only, save_tokenizer() excepted."""

import json
import random
import re
from pathlib import Path

PAD, IM_START, IM_END, THINK, ETHINK = 0, 1, 2, 3, 4
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
VOCAB_SIZE = 896
PAT_SRC = r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]|\s"
PAT = re.compile(PAT_SRC)
SPLIT = re.compile("(" + "|".join(re.escape(s) for s in SPECIALS) + ")")

WORDS = """user assistant system Answer run the program const line round add sub set to from is was so then
thus done at end What what start with constants ledger account accounts price prices has costs one event events
buys had now node nodes left right value total even odd step steps go walk of take put level new seen goal path
graph near red green blue free none back next color colors ok sort numbers item items scan yes no got bucket
sorted number sum column d carry answer is which colour shortest find by and in let me see check first last
times until over all after before think wait hmm ones tens borrow gives work long short""".split()
PUNCT = [".", ",", ":", "+", "-", "=", ">", ";", "*", "(", ")", "?", "!"]


def _names(n=320):
    r = random.Random(20251201)
    cons, vow = "bdfgklmnprstvz", "aeiou"
    allw = [a + b + c + d for a in cons for b in vow for c in cons for d in vow]
    r.shuffle(allw)
    w = set(WORDS)
    return [x for x in allw if x not in w][:n]


NAMES = _names()


def _byte_alphabet():
    """GPT-2 byte -> printable character table."""
    bs = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    cs = bs[:]
    n = 0
    for b in range(256):
        if b not in bs:
            bs.append(b)
            cs.append(256 + n)
            n += 1
    return {b: chr(c) for b, c in zip(bs, cs)}


BYTE_CH = _byte_alphabet()


def _to_bl(s):
    return "".join(BYTE_CH[b] for b in s.encode("utf8"))


def build_vocab():
    """Token text in the byte alphabet -> id: specials, the 256 bytes, words, names, digits, punctuation."""
    vocab = {s: i for i, s in enumerate(SPECIALS)}
    for b in range(256):
        vocab[BYTE_CH[b]] = len(vocab)
    pre = []
    for w in dict.fromkeys(WORDS):
        pre += [w, " " + w]
    pre += [" " + n for n in NAMES] + [" " + str(d) for d in range(10)] + [" " + p for p in PUNCT]
    for p in pre:
        k = _to_bl(p)
        if k not in vocab:
            vocab[k] = len(vocab)
    if len(vocab) > VOCAB_SIZE:
        raise ValueError(
            f"the word lists need {len(vocab)} tokens, VOCAB_SIZE is {VOCAB_SIZE}; raise it or drop words."
        )
    return vocab


VOCAB = build_vocab()
N_USED = len(VOCAB)
W2I = {}
_inv_ch = {c: b for b, c in BYTE_CH.items()}
I2S = [""] * VOCAB_SIZE
for _k, _i in VOCAB.items():
    if _i < len(SPECIALS):
        W2I[_k] = _i
        I2S[_i] = _k
    else:
        _raw = bytes(_inv_ch[c] for c in _k)
        I2S[_i] = _raw.decode("latin1") if len(_raw) == 1 else _raw.decode("utf8")
        try:
            W2I[_raw.decode("utf8")] = _i
        except UnicodeDecodeError:
            pass


def encode(text):
    """Same result as the saved HF tokenizer, without needing it (and faster)."""
    out = []
    for part in SPLIT.split(text):
        if part in _SPEC:
            out.append(_SPEC[part])
            continue
        for t in PAT.findall(part):
            i = W2I.get(t)
            if i is None:
                out.extend(VOCAB[BYTE_CH[b]] for b in t.encode("utf8"))
            else:
                out.append(i)
    return out


def decode(ids):
    """Text of a sequence of token ids."""
    return "".join(I2S[int(i)] for i in ids)


_SPEC = {s: i for i, s in enumerate(SPECIALS)}

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(out):
    """Write the tokenizer to folder `out` in the form that transformers and SGLang load."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tok = Tokenizer(models.BPE(vocab=VOCAB, merges=[], ignore_merges=True))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PAT_SRC), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS[:3]])
    tok.add_tokens([AddedToken(s, special=False, normalized=False) for s in SPECIALS[3:]])
    ft = PreTrainedTokenizerFast(
        tokenizer_object=tok,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
    ft.chat_template = CHAT_TEMPLATE
    ft.save_pretrained(out)
    p = Path(out) / "tokenizer_config.json"
    cfg = json.loads(p.read_text())
    cfg["tokenizer_class"] = "PreTrainedTokenizerFast"  # a name that transformers 4 and 5 both load
    cfg.setdefault("chat_template", CHAT_TEMPLATE)
    p.write_text(json.dumps(cfg, indent=1))
