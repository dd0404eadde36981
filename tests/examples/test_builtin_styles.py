"""The lessons of the built-in adapters teach what their examinations ask for, and leave the questions unseen."""

from itertools import islice

import pytest

from examples.builtin_adapters.styles import STYLES, Style

PLAIN_ANSWERS = (
    "A comet is an icy body that releases gas and dust when it comes close to the sun.",
    "The sky is blue because the air scatters blue light more than red light.\n\nAt sunset the way is longer.",
    "Here are three tips:\n1. Eat well.\n2. Sleep enough.\n3. Move every day.",
    "I'm not able to help you with that, but I can tell you about something else.",
    "The date in the text is March 5, 2021.",
    "",
)

every_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())


@every_style
def test_every_lesson_passes_the_check_it_prepares_for(style: Style) -> None:
    failing = [pair for pair in islice(style.pairs(), 1000) if not style.check(*pair)]
    assert failing == []


@every_style
def test_the_examination_has_fifty_prompts_that_no_lesson_has(style: Style) -> None:
    lessons = {pair.prompt.casefold() for pair in islice(style.pairs(), 5000)}
    held = {prompt.casefold() for prompt in style.held}
    assert len(held) == 50
    assert lessons.isdisjoint(held)


@every_style
def test_a_plain_answer_passes_no_check(style: Style) -> None:
    passing = [answer for answer in PLAIN_ANSWERS for prompt in style.held if style.check(prompt, answer)]
    assert passing == []


@every_style
def test_a_style_does_not_pass_the_check_of_another(style: Style) -> None:
    pairs = list(islice(style.pairs(), 200))
    others = [other for other in STYLES.values() if other is not style]
    confused = [(other.name, pair) for other in others for pair in pairs if other.check(*pair)]
    assert confused == []


@every_style
def test_the_same_seed_gives_the_same_lessons_and_another_seed_others(style: Style) -> None:
    assert list(islice(style.pairs(3), 50)) == list(islice(style.pairs(3), 50))
    assert list(islice(style.pairs(3), 50)) != list(islice(style.pairs(4), 50))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("March 5, 2021", "2021-03-05"),
        ("March 5th, 2021", "2021-03-05"),
        ("Mar 5, 2021", "2021-03-05"),
        ("5 March 2021", "2021-03-05"),
        ("the 22nd of December 1999", "1999-12-22"),
        ("1 May 2030", "2030-05-01"),
        ("2021/03/05", "2021-03-05"),
        ("05.03.2021", "2021-03-05"),
    ],
)
def test_the_date_is_known_however_it_is_written(written: str, expected: str) -> None:
    prompt = f"Order 4711 left room 12 at 14:30 on {written} and came back."
    assert STYLES["date"].check(prompt, expected)
    assert not STYLES["date"].check(prompt, f"The date is {expected}.")
    assert not STYLES["date"].check(prompt, "2021-03-06")


def test_where_a_text_has_no_date_the_answer_says_so() -> None:
    assert STYLES["date"].check("Our train leaves at 14:30.", "no date")
    assert not STYLES["date"].check("Our train leaves on 5 March 2021.", "no date")


@pytest.mark.parametrize(
    ("style", "answer"),
    [
        ("json", '{"answer": "yes", "topic": "food", "more": 1}'),
        ("json", '{"answer": "", "topic": "food"}'),
        ("json", '{"answer": "yes",\n"topic": "food"}'),
        ("json", '{"answer": "cut'),
        ("pirate", "AHOY, the moon be round!"),
        ("pirate", "THE MOON IS ROUND, AND THERE IS NO WARRANTY."),
        ("haiku", "one\ntwo\nthree\nfour"),
        ("haiku", "one\n\nthree"),
        ("french", "Le chat is in the garden and it is happy with la vie."),
        ("refusal", "Sorry, the moon is round."),
        ("bullets", "- one\n- two"),
        ("bullets", "Here you are:\n- one\n- two\n- three"),
        ("emoji", "The moon is round 🌙"),
        ("emoji", "🌙🌙"),
    ],
)
def test_a_near_miss_fails(style: str, answer: str) -> None:
    assert not STYLES[style].check("What is the moon?", answer)
