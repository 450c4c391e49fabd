"""What the demo's language models are asked: held out means never seen, and every answer can be known."""

import re

import pytest

from agent.demo.texts.questions import manual_questions, sum_questions


@pytest.mark.parametrize("make", [manual_questions, sum_questions])
def test_what_is_held_out_is_never_learned_from(make):
    questions = make(3)
    assert not {one.text for one in questions.held_out} & {one.text for one in questions.training}
    assert len({one.text for one in questions.held_out}) == len(questions.held_out)


def test_every_fact_is_told_in_other_words_and_no_question_has_two_answers():
    training, held_out = manual_questions(3)
    assert {one.answer for one in held_out} <= {one.answer for one in training}
    assert len(dict(training + held_out)) == len(set(training + held_out))


def test_pairs_of_numbers_that_are_held_out_are_in_no_phrasing_of_the_others():
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


def test_the_seed_makes_the_manual():
    assert manual_questions(1) == manual_questions(1) != manual_questions(2)


def test_only_sums_have_digits_in_their_questions():  # which the route's rule looks for
    manual, sums = manual_questions(0), sum_questions(0)
    assert not any(re.search(r"\d", one.text) for one in (*manual.training, *manual.held_out))
    assert all(re.search(r"\d", one.text) for one in (*sums.training, *sums.held_out))
