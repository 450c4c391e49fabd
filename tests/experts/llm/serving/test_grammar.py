"""Texts under a grammar: whatever a model prefers, they parse; a grammar that cannot be served costs no other text."""

import json
import re
import threading

import jsonschema_rs
import pytest
import torch

from experts.daemon_threads import DaemonThreads
from experts.errors import GrammarInvalid
from experts.expert import Rejected
from experts.llm.serving import grammar as grammars
from experts.llm.serving import grammar_trial
from experts.llm.serving.generation import Sampling
from experts.llm.serving.sampling import Sampler, sample
from experts.llm.text.constraints import Constraint
from experts.llm.text.tokenizer import TextModel
from tests.experts.llm.serving.conftest import Desk, byte_grammar
from tests.experts.llm.text.conftest import byte_level, like_sentencepiece, text_files

PADDING = 9  # tokens of a model beyond its tokenizer's
MOST = 4000
TOKENIZERS = {
    "byte level": TextModel.of(text_files(byte_level()), "tiny"),
    "like SentencePiece": TextModel.of(text_files(like_sentencepiece(), settings={"eos_token": "</s>"}), "tiny"),
}
OBJECT = {"type": "object", "additionalProperties": False}
SHORT = {"type": "string", "maxLength": 6}
SCHEMAS = {
    "string": SHORT,
    "enum": {"enum": ["ok", 'a "quoted" one', 7, None, "été"]},
    "integer": {"type": "integer", "minimum": -20, "exclusiveMaximum": 1000},
    "number": {"type": "number", "minimum": 0.5, "maximum": 9.25},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
    "format": {"type": "string", "format": "uuid"},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    "array": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 4},
    "object": OBJECT | {"properties": {"part": SHORT, "n": {"enum": [0, 1]}}, "required": ["part", "n"]},
    "optional": OBJECT | {"properties": {"a": {"type": "null"}, "b": {"type": "boolean"}}},
    "nested": OBJECT | {"properties": {"at": OBJECT | {"properties": {"x": {"type": "null"}}}}, "required": ["at"]},
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    "reference": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": OBJECT | {
                "properties": {"leaf": {"const": 1}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
                "required": ["leaf", "next"],
            }
        },
    },
}  # fmt: skip


def random_text(model, constraint, seed, prompt=(5,), sampling=None):
    """What a model of random logits writes, and whether its grammar or a stop token has ended it."""
    sampler = Sampler(sampling or Sampling(seed=seed), prompt, model.grammar(constraint, None, prompt))
    generator = torch.Generator().manual_seed(seed)
    tokens = []
    while len(tokens) < MOST and not sampler.grammar.is_complete:
        (token,) = sample(2 * torch.randn(1, model.tokens + PADDING, generator=generator), [sampler])
        assert sampler.grammar.fault is None
        if token.id in model.stop_tokens:
            return model.decode(tokens), True
        tokens.append(token.id)
        sampler.wrote(token.id)
    return model.decode(tokens), sampler.grammar.is_complete


@pytest.mark.parametrize("model", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_text_of_a_random_model_under_a_schema_validates(model, schema):
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    for seed in range(6):
        text, is_over = random_text(model, Constraint.of_json("schema", schema), seed)
        assert is_over, text
        assert validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize("model", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize(
    ("constraint", "allowed"),
    [
        (Constraint.of_regex("regex", r"[a-f]{3}/\d{1,2}(é|🙂)?"), r"[a-f]{3}/\d{1,2}(é|🙂)?"),
        (Constraint.of_choice("choice", ["yes", 'no "way"', "naïve", "a\nb"]), 'yes|no "way"|naïve|a\nb'),
        (Constraint.of_grammar("grammar", 'start: ("a" | B)+ "."\nB: /[0-9]{2}/'), r"(a|[0-9]{2})+\."),
        (Constraint.of_grammar("grammar", 'root ::= "a" [0-9]+ "b"'), "a[0-9]+b"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_text_of_a_random_model_under_a_pattern_matches_it(model, constraint, allowed):
    for seed in range(6):
        text, is_over = random_text(model, constraint, seed)
        assert is_over, text
        assert re.fullmatch(allowed, text.removeprefix(" ")), text


def test_grammar_waits_for_the_end_of_a_reasoning_that_the_prompt_has_opened():
    model = TOKENIZERS["byte level"]
    prompt = model.encode("so <think>\n")
    sampler = Sampler(Sampling(seed=1), prompt, model.grammar(Constraint.of_choice("choice", ["yes"]), None, prompt))
    for token in model.encode("why not</think>"):
        assert not sampler.grammar.banned()[token]
        sampler.wrote(token)
    assert sampler.grammar.banned()[model.encode("w")[0]]
    assert not sampler.grammar.banned()[model.encode("y")[0]]


ENDLESS = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
NODES = 1300
CHAIN = {
    f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{to % NODES}"} for to in (n + 1, 7 * n)] + [{"type": "string"}]}
    for n in range(NODES)
}
DEEP = {"$ref": "#/$defs/a0", "$defs": CHAIN}
DEEP_RULES = "\n".join(f"a{n}: a{n + 1} a{n + 1} | a{n + 1}" for n in range(4000))
ONE_OF_MANY = [{"type": "object", "properties": {f"a{n}": {"type": "string"}}} for n in range(20)]
WIDE = {"allOf": [{"anyOf": ONE_OF_MANY} for _ in range(20)]}


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint.of_json("schema", {"type": "objec"}), "Invalid type: objec"),
        (Constraint.of_json("schema", {"not": {"type": "string"}}), "Unimplemented keys"),
        (Constraint.of_json("schema", {"$ref": "http://127.0.0.1/x"}), "does not fetch"),
        (Constraint.of_json("schema", ENDLESS), "cannot be served"),
        (Constraint.of_json("schema", False), "false"),
        (Constraint.of_json("schema", {"enum": ["x" * 140_000]}), "131072 are the most"),
        (Constraint.of_json("schema", WIDE), "too large"),
        (Constraint.of_json("schema", DEEP), "nested too deeply"),
        (Constraint.of_grammar("grammar", f'start: a0\n{DEEP_RULES}\na4000: "x"'), "nested too deeply"),
        (Constraint.of_regex("regex", "a("), "unclosed group"),
        (Constraint.of_regex("regex", "(?=a)b"), "look-around"),
        (Constraint.of_regex("regex", "(" * 9000 + ")" * 9000), "cannot be served"),
        (Constraint.of_grammar("grammar", "start: other"), "other"),
        (Constraint.of_grammar("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "too deeply nested"),
    ],
)  # fmt: skip
def test_grammar_that_cannot_be_served_is_refused_with_its_field_and_the_reason(constraint, reason):
    with pytest.raises(GrammarInvalid, match=re.escape(reason)) as refused:
        TOKENIZERS["byte level"].grammar(constraint, None, (5,))
    assert refused.value.field == constraint.field


def test_grammar_that_compiles_for_minutes_is_refused_after_its_time(monkeypatch):
    monkeypatch.setattr(grammar_trial, "LIMITS", grammar_trial.LIMITS._replace(processor_s=1))
    patterns = " & ".join(f"/.*a.{{{n}}}/" for n in range(1, 2000))
    with pytest.raises(GrammarInvalid, match="takes more than"):
        TOKENIZERS["byte level"].grammar(Constraint.of_grammar("grammar", f"start: A\nA: {patterns}"), None, (5,))


def test_keyword_that_cannot_be_served_demands_nothing_of_a_schema_that_is_not_strict():
    schema = {"type": "array", "items": {"enum": [1]}, "maxItems": 2, "uniqueItems": True}
    text, _ = random_text(TOKENIZERS["byte level"], Constraint.of_json("schema", schema, is_strict=False), 1)
    assert set(json.loads(text)) <= {1}


DIGITS = byte_grammar(Constraint.of_regex("regex", "[1-3]{3}"))
LONG = byte_grammar(Constraint.of_regex("regex", "[1-3]{99}"))


def test_text_whose_grammar_has_ended_stops_and_its_neighbours_write_on():
    desk = Desk()
    desk.ask(1, [3], 9, grammar=DIGITS).ask(2, [40], 9).ask(3, [7], 4, grammar=LONG)
    written = desk.finish()
    assert bytes(written[1]).decode().isdigit()
    assert [len(written[1]), len(written[3])] == [3, 4]
    assert [desk.finished[request].label for request in (1, 2, 3)] == ["stop", "length", "length"]
    assert written[2] == list(range(41, 50)), "a text without a grammar is what it is alone"


def test_preempted_text_keeps_its_place_in_its_grammar():
    place = byte_grammar(Constraint.of_regex("regex", "([0-9]{2}[a-f]{3}){4}"))
    drawing = {"sampling": Sampling(temperature=3.0, seed=5), "grammar": place}
    alone, desk = Desk(), Desk()
    alone.ask(1, [3], 20, **drawing).finish()
    desk.ask(1, [3], 20, **drawing)
    for _ in range(4):
        desk.quantum(0)
        desk.engine.preempt(1)
    assert desk.finish() == {1: alone.notes[1].tokens}
    assert re.fullmatch("([0-9]{2}[a-f]{3}){4}", bytes(desk.notes[1].tokens).decode())


def test_logprob_of_a_token_under_a_grammar_is_the_models_own():
    desk = Desk()
    desk.ask(1, [3], 1, grammar=DIGITS, sampling=Sampling(temperature=0.0, logprobs=1)).finish()
    (token,) = desk.notes[1].sampled
    own = torch.zeros(250)
    own[4] = 8.0
    expected = own.log_softmax(dim=-1)
    assert token.id in b"123"
    assert (token.logprob, token.alternatives[0].id) == (pytest.approx(float(expected[token.id])), 4)


def test_mask_that_never_comes_ends_its_own_text_and_holds_up_no_later_one(monkeypatch):
    monkeypatch.setattr(grammars, "LATE_S", 0.01)
    may_end = threading.Event()
    hanging = DaemonThreads(1, "hanging")
    hanging.submit(may_end.wait)
    monkeypatch.setattr(grammars, "_threads", hanging)
    desk = Desk()
    desk.ask(1, [3], 9, grammar=LONG).ask(2, [40], 9)
    assert desk.finish()[2] == list(range(41, 50))
    assert "takes too long" in desk.finished[1].reason
    monkeypatch.setattr(grammars, "LATE_S", 60.0)
    assert len(desk.ask(3, [3], 9, grammar=DIGITS).finish()[3]) == 3
    may_end.set()


def test_grammar_whose_masks_take_too_long_ends_its_own_text_only(monkeypatch):
    monkeypatch.setattr(grammars, "MASKS_S", -1.0)
    desk = Desk()
    desk.ask(1, [3], 9, grammar=LONG).ask(2, [40], 9)
    assert desk.finish()[2] == list(range(41, 50))
    assert isinstance(desk.finished[1], Rejected)
    assert "takes too long" in desk.finished[1].reason
