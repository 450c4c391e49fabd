"""What the demo's language models are asked: held out means never seen, and every answer can be known."""

import re

import pytest

from agent.demo.texts.questions import manual_questions, sum_questions


@pytest.mark.parametrize("make", [manual_questions, sum_questions])
def test_held_out_questions_are_never_learned_from(make):
    questions = make(3)
    assert not {one.text for one in questions.held_out} & {one.text for one in questions.training}
    assert len({one.text for one in questions.held_out}) == len(questions.held_out)


def test_held_out_facts_are_learned_in_other_words_and_no_question_has_two_answers():
    training, held_out = manual_questions(3)
    assert {one.answer for one in held_out} <= {one.answer for one in training}
    assert len(dict(training + held_out)) == len(set(training + held_out))


def test_held_out_pairs_of_numbers_are_in_no_training_phrasing():
    questions = sum_questions(3)

    def pair(question):
        return tuple(map(int, re.findall(r"\d+", question.text)))

    assert not {pair(one) for one in questions.held_out} & {pair(one) for one in questions.training}


def test_sums_are_right():
    questions = sum_questions(3)
    for one in (*questions.training, *questions.held_out):
        for a, b, total in re.findall(r"(\d+) \+ (\d+) = (\d+)", one.answer):
            assert int(a) + int(b) == int(total)
        assert re.findall(r"\d+", one.text) == re.findall(r"\d+", one.answer)[-3:-1]


def test_seed_determines_the_manual():
    assert manual_questions(1) == manual_questions(1) != manual_questions(2)


def test_only_questions_of_sums_have_digits():  # which the route's rule looks for
    manual, sums = manual_questions(0), sum_questions(0)
    assert not any(re.search(r"\d", one.text) for one in (*manual.training, *manual.held_out))
    assert all(re.search(r"\d", one.text) for one in (*sums.training, *sums.held_out))
