r"""The \boxed{} verifier, and the table of tricky answers for every verifier."""

import threading

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.audits import answer_cases, verifiers
from jaxrl_llm.audits.cases import wrong
from jaxrl_llm.rewards import RewardError, combine, math
from jaxrl_llm.rewards.math import last_boxed, normalise, quick_verdict
from jaxrl_llm.rewards.process import Outcome

pytest.importorskip("math_verify")
from jaxrl_llm.rewards.symbolic import symbolic_equal  # noqa: E402


@pytest.fixture(scope="module")
def boxed():
    reward = rewards.make("boxed", workers=2, deadline=2.0)
    yield reward
    reward.fn.close()


@pytest.mark.parametrize(("text", "content"), [
    (r"\boxed{ 2 } and \boxed{x^{2}+1}", "x^{2}+1"), (r"first \boxed{3} then \boxed{4", None), ("5", None),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"), (r"\boxed{\left\{x\right.}", r"\left\{x\right."), (r"\boxed{}", ""),
    (r"\boxed {5}", "5"), (r"$\boxed 5$.", "5"), (r"\boxed -1,024.", "-1,024"), (r"\boxed\frac12", r"\frac12"),
    (r"\boxed \sqrt{2} \)", r"\sqrt{2}"), (r"so \boxed\text{Paris}", r"\text{Paris}"), (r"\boxed A", "A"),
    (r"\boxed{5}, as \boxed is asked", "5"), (r"\boxedx 5", None), (r"\boxed{3} \boxed {4", None),
    (r"\boxed{a}}", "a"), (r"\boxed{\\}", r"\\"), ("\\boxed{a\\", None), (r"\boxed 7", "7"),
])
def test_last_boxed(text, content):
    assert last_boxed(text) == content


def test_quick_verdicts_need_no_worker():
    assert normalise(r"$\left( 1{,}000 ,\ \dfrac{1}{2} \right)$.") == r"( 1,000 ,\ \frac{1}{2} )"
    assert normalise(r"a \leftarrow b") == r"a \leftarrow b"
    assert quick_verdict("0.5", r"\frac12") is True and quick_verdict("0.5", "0.51") is False
    assert quick_verdict("0", "1 000") is False and quick_verdict("x+1", "1+x") is None


@pytest.mark.parametrize(("answer", "given", "verdict"), [
    # a question that is repeated
    ("579", "123+456", False), ("56", r"7\cdot 8", False), ("55", r"\sum_{i=1}^{10} i", False),
    ("9", r"\int_0^3 x^2 dx", False), ("5", "6=5", False), ("5", "[5,5]", False), ("5", "5_6", False),
    ("1024", "2^{10}", False), ("120", "5!", False), ("5", r"\sqrt{25}", False), (r"\frac{\pi}{4}", r"\int_0^1 f(x) dx", False),
    (r"\sqrt{8}", r"\sqrt{4+4}", False), ("x^2", r"\int 2x dx", False),
    # a number in its many forms
    ("579", "123+456=579", True), ("5", "x = 5", True), ("5", "5 = x", True), ("-0.75", r"-\frac34", True),
    ("1000", r"10^{3}", True), ("300000000", r"3\cdot10^8 \text{ m/s}", True), ("120", r"120 \mathrm{~km} / \mathrm{h}", True),
    ("1/2", r"\displaystyle \frac{1}{2}", True), ("1/2", r"\mathbf{\frac{1}{2}}", True), ("1/3", r"0.\overline{3}", True),
    ("-1/6", r"-0.1\bar{6}", True), ("7", r"5^{\text{th}}", False), ("5", r"5^{\text{th}}", True), ("5", r"5\ \text{cm}", True),
    ("0.5", r"50 \text{ \%}", True), ("50", "50 percent", True), (r"50\%", "0.5%", False), ("5", r"5^{\circ} \mathrm{C}", True),
    # one that is denied, doubted or one of several
    ("5", r"x \neq 5", False), ("5", "5 or 6", False), ("5", r"5\text{ or six}", False), ("5", "x=6, y=5", False),
    ("5", "5 million", False), ("5", "5x", False), ("5", "5{}5", False), ("5", r"\text{not }5", False), ("5", "5-6", False),
    # commas: of thousands, or of a pair
    ("1000", "1,000", True), ("1,000", "1{,}000", True), ("1000", r"1{,}000 \text{ m}", True), ("5", "(5)", True),
    ("100", "(0,100)", False), ("100", "0,100", False), ("12144", "(12,144)", False), ("12144", r"\left(12,144\right)", False),
    ("12144", r"\mathbf{(12,144)}", False), ("12,144", "12144", True), ("32349", "32, 349", False), ("32349", "32,349", True),
    ("(0,100)", "(0, 100)", True), ("(0,100)", "100", None), ("(12,144)", "(12, 144)", True), ("(12,144)", "12144", None),
    (r"1000\pi", r"1,000\pi", True), (r"1000\pi", r"1{,}000\pi", True), (r"\pi+1234567", r"1,234,567+\pi", None),
    (r"1000\pi", r"1,00\pi", False), (r"1000\pi", r"1,000,\pi", False), (r"1000\pi", r"1000\pi,2", False),
    (r"\pm 2", "2,-2", None), (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}", None), ("2", "2,3", False),
    (r"2\sqrt{2}", r"2\sqrt{2},2\sqrt{2}", False), (r"2\sqrt{2}", r"2\sqrt{2}, 3", False),
    # words that change a number, and those that do not
    ("5", r"5\text{ thousands}", False), ("5", "5 dozens", False), ("5", r"5\text{ tenths}", False), ("5", "5K", False),
    ("5", "5 K", True), ("5", r"5\,\mathrm{K}", True), ("5", r"5\text{ fifth graders}", True), ("5", "5 tenth", False),
    ("5", r"5\text{ two-digit numbers}", True), ("5", r"5\text{ point two}", False), ("5", r"5\text{ below zero}", False),
    ("5", r"5 \text{ but maybe } 6", False), ("5", "5 vs 6", False), ("5", "5 pi", False), ("k", "k = 5", None),
    ("5", "k = 5", True),
    # one number in several spellings
    ("5/2", "2 1/2", True), ("5/2", "2\u00bd cups", True), ("1/2", "2 1/2", False), ("1000", "1 000", True),
    ("-5", "x = - 5", True),
    ("12", r"12_{10}", True), ("12", "12_3", False), ("12", r"12\ \mathrm{m\,s^{-1}}", True),
    ("12", r"\textcolor{red}{12}", True),
    (r"6\sqrt{3}", "6\u221a3", True), (r"\emptyset", r"\varnothing", True),
    (r"n \equiv 1 \pmod{4}", r"n\equiv 1 \pmod 4", True),
    ("1010_2", "1010_{2}", True), ("x^{2}", "x^2", True), ("3+4i", "3 + 4 i", True), ("C", "B = C", False),
    ("C", "x = C", True),
    (r"2\pi", r"2\pi\text{ thousands}", False), ("x", r"x \text{ is odd}", False), (r"\{1,2\}", r"1 \text{ or } 2", None),
    # what surrounds an answer
    ("5", "The answer is $5$.", True), ("5", "The square of $5$", False), ("5", "The answer is $2+3$", False),
    ("x", r"We find that \(x\).", True), ("9", r"Answer \[ 9 \]", True), ("The final answer is $9$. I hope so.", "9", True),
    ("x", "$y$, and the final answer is $x$", True), ("x", "It is wrongly said that $x$", False),
    ("x = 11", "x = 11 = x = 11", True), ("E", "E = E", True), ("5", "5 = 6 = 5", False), ("E", "E = F = E", False),
    ("Paris", "London = Paris", False), ("Paris", "Paris = London = Paris", False), ("Paris", "city = Paris", False),
    ("Paris", "x = Paris", True), ("Paris", "Paris = Paris", True), ("DE", "AC = DE", None), ("abc", "lwh = abc", None),
    (r"n \equiv 1 \pmod{4}", r"f(x) = (n \equiv 1.0 \pmod{4.0})\text{ cm}", True), ("x", r"x \text{ is prime}", False),
    ("(x=1, y=2)", "x=1, y=2", True), ("1000", "x = 1 000", True), ("123456789", "123 456 789", True), ("1.05", "1.5", False),
    # left to the symbolic checker
    (r"\sqrt{8}", r"2\sqrt{2}", None), ("x^2+2x+1", "(x+1)^2", None), (r"\pi", r"2\pi-\pi", None), ("(1,2)", "(1,1+1)", False),
    ("(1,2)", r"(1,\sqrt{4})", None), ("(1,2)", r"\begin{pmatrix}1\\2\end{pmatrix}", None)])
def test_a_number_is_worked_out(answer, given, verdict):
    assert quick_verdict(answer, given) is verdict


def test_loose_boxes_are_those_of_the_symbolic_checker():
    assert quick_verdict("579", "123+456", strict=False) is None and quick_verdict("579", "578", strict=False) is False


@pytest.mark.slow
def test_symbolic_verdicts_and_counts(boxed):
    pairs = [(r"\boxed{(x+1)^2}", "x^2+2x+1", 1), (r"\boxed{x}", "y", 0), (r"\boxed{9^{9^{9^{9}}}}", r"\sqrt{5}", 0),
             (r"\boxed{9^{9^{9^{9}}}}", r"\sqrt{5}", 0), ("no box", "5", 0), (r"\boxed{\frac{1}{2}}", "0.5", 1)]
    scores = combine([boxed])([p[0] for p in pairs], [p[1] for p in pairs])
    assert scores.total.tolist() == [p[2] for p in pairs]
    assert scores.failures == {"boxed/no_answer": 1, "boxed/timeout": 2}


@pytest.mark.slow
def test_a_pair_is_not_a_number_in_groups_of_three(boxed):
    given = {r"\boxed{(0, 100)}": "(0,100)", r"\boxed{100}": "(0,100)", r"\boxed{(12, 144)}": "(12,144)",
             r"\boxed{12144}": "(12,144)"}
    assert combine([boxed])([*given], [*given.values()]).total.tolist() == [1, 0, 1, 0]


@pytest.mark.slow
def test_commas_of_thousands_and_of_two_signs(boxed):
    rows = [(r"\pm 2", "2,-2", 1), (r"\pm 2", "-2, 2", 1), (r"\pm 2", "2,3", 0), (r"\pm 2", "2,-2,3", 0), (r"\pm 2", "2", 0),
            (r"1 \pm \sqrt{19}", r"1+\sqrt{19},1-\sqrt{19}", 1), (r"1 \pm \sqrt{19}", r"1+\sqrt{19},1+\sqrt{19}", 0),
            (r"1000\pi", r"1,000\pi", 1), (r"\pi+1234567", r"1,\!234{,}567+\pi", 1), (r"\pi+1234", r"1,235+\pi", 0),
            ("2", "2,3", 0), (r"2\sqrt{2}", r"2\sqrt{2},2\sqrt{2}", 0)]
    scores = combine([boxed])([rf"\boxed{{{given}}}" for _, given, _ in rows], [answer for answer, _, _ in rows])
    assert scores.total.tolist() == [right for _, _, right in rows]


def test_works_from_another_thread(boxed):
    actual = []
    thread = threading.Thread(target=lambda: actual.append(combine([boxed])([r"\boxed{2(a+b)}"], ["2a+2b"])))
    thread.start()
    thread.join()
    assert actual[0].total.tolist() == [1.0] and actual[0].failures == {}


def test_canary_stops_a_checker_that_is_wrong(monkeypatch):
    reward = rewards.make("boxed", workers=1)
    monkeypatch.setattr(math, "CANARIES", (("x+1", "1+x", False),))  # the fault: sound checker, wrong known answer
    with pytest.raises(RewardError, match=r"judged '1\+x' against 'x\+1' .* expected False; check the installation"):
        combine([reward], on_error="zero")([r"\boxed{y}"], ["x"])
    reward.fn.close()


@pytest.mark.slow
def test_a_canary_that_is_late_is_judged_again(monkeypatch):
    """As on a machine that is busy while workers start; one that is late three times is no working checker."""
    reward, judged = rewards.make("boxed", workers=1), []
    real = reward.fn._pool.map

    def slow_at_first(pairs, until=None):
        judged.append(len(pairs))
        return [Outcome("timeout")] * len(pairs) if len(judged) <= late else real(pairs, until)

    monkeypatch.setattr(reward.fn._pool, "map", slow_at_first)
    late = 2
    assert combine([reward])([r"\boxed{1+x}"], ["x+1"]).total.tolist() == [1.0] and judged == [3, 3, 3, 1]
    monkeypatch.setattr(reward.fn, "_tested", False)
    judged.clear()
    late = 9
    with pytest.raises(RewardError, match="status='timeout'.* whether the deadline leaves it time"):
        combine([reward], on_error="zero")([r"\boxed{1+x}"], ["x+1"])
    assert judged == [3, 3, 3]
    reward.fn.close()


# verifier: (cases, false positives, false negatives). Each wrong verdict is listed by the module when it is run.
EXPECTED = {"exact": (74, 0, 39), "numeric": (59, 0, 7), "last_number": (78, 7, 2), "boxed": (211, 3, 0)}


def counts(result):
    return result.cases, len(result.false_positives), len(result.false_negatives)


@pytest.mark.parametrize("verifier", ["exact", "numeric", "last_number"])
def test_counts_on_the_table_of_tricky_answers(verifier):
    assert counts(verifiers.report(verifier)) == EXPECTED[verifier]


@pytest.mark.slow
def test_counts_of_the_boxed_verifier():
    result = verifiers.report("boxed", deadline=20.0)  # a busy machine must not decide
    assert counts(result) == EXPECTED["boxed"]
    assert result.false_positives == [
        (r"So \boxed{1,2}", "(1,2)"), (r"So \boxed{2,1,3}", "1,2,3"), (r"So \boxed{a}", "A")]
    loose = verifiers.report("boxed", strict=False, deadline=20.0)
    assert len(verifiers.WORK) == 124 and counts(loose) == (211, 56, 4)
    assert loose.false_negatives == [(rf"So \boxed{{{form}}}", answer) for form, answer in (
        ("5 cm^2", "5"), (r"0.8\overline{3}", "5/6"), (r"0.8\bar{3}", "5/6"), ("5 km/h", "5"))]


@pytest.mark.slow
def test_further_answers_by_kind():
    cases = answer_cases.ANSWER_CASES
    assert len(cases) == 207 and sum(case.right for case in cases) == 90
    assert wrong(cases, answer_cases.ANSWER_JUDGES["boxed"](cases)) == ([], [])


def test_further_numbers_and_stop_strings():
    numbers, stops = answer_cases.NUMBER_CASES, answer_cases.STOP_CASES
    assert len(numbers) == 35 and wrong(numbers, answer_cases.NUMBER_JUDGES["last_number"](numbers)) == ([], [])
    ours, without = answer_cases.STOP_JUDGES.values()
    assert wrong(stops, ours(stops)) == ([], []) and list(map(len, wrong(stops, without(stops)))) == [0, 4]


@pytest.mark.parametrize("answer, given, equal", [
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", False), (r"\frac{1}{2004!}", r"\frac{1}{2006!}", False),
    ("e^{-50}", "e^{-51}", False),
    (r"x+\frac{1}{2^{99}}", r"x+\frac{1}{2^{98}}", False), (r"[\frac{1}{2^{99}},1]", r"[\frac{1}{2^{98}},1]", False),
    (r"-\infty", r"\infty", False), (r"\frac{1}{2^{99}}", "2^{-99}", True), (r"\frac{\pi}{4}", "0.785398", True),
    ("2x+4y-3=0", r"y=-\frac{1}{2}x+\frac{3}{4}", True), (r"\sqrt{2}", r"\sqrt{2} \approx 1.414", True),
    (r"\sqrt{2}", r"\sqrt{2} \approx 1.5", False), (r"\sqrt{3}", r"\sqrt{2} = \sqrt{3}", False), ("x+1", "y=x+2=x+1", False),
    ("C", "A=B=C", False), (r"2\pi", r"C = 2\pi r = 2\pi", True), (r"2\pi", r"\pi+\pi", False),
    (r"10\pi", r"2\pi\cdot 5", False),
    ("4+6i", "(1+2i)+(3+4i)", False), (r"5\sqrt{3}", r"\sqrt{12}+\sqrt{27}", False), (r"\ln 8", r"3\ln 2", True),
    (r"\frac{1+\sqrt{5}}{2}", r"\frac{1}{2}+\frac{\sqrt{5}}{2}", True), (r"\frac{\sqrt{3}}{2}", r"\sin 60^\circ", False),
    (r"36\pi", r"6^2\pi", False), (r"(2,\pi)", r"(\sqrt{4},\pi)", False), ("1,3", r"1,3,5,\ldots", False),
    (r"\sqrt{3}", r"\sqrt{3}\text{ (or }\sqrt{2}", False), (r"\text{odd}", "odd", True),
    (r"\frac{1}{2}, \frac{-1 \pm \sqrt{13}}{4}", r"x=\frac12, x=-\frac14 \pm \frac{\sqrt{13}}{4}", True),
    (r"\frac{1}{2}, \frac{-1 \pm \sqrt{13}}{4}", r"\frac{1}{2}, \frac{-1 + \sqrt{13}}{4}", False),
    (r"x=2k\pi, k \in \mathbb{Z}", r"x = 2\pi k, k \in \mathbb{Z}", True),
    (r"x=2k\pi, k \in \mathbb{Z}", r"x = 2\pi k, k \in \mathbb{N}", False),
    (r"3 \text{ red}, x \in A", r"3 \text{ blue}, x \in A", False), ("3 red, x", "3 blue, x", False),
    (r"56, k \in A", r"\binom{8}{3}, k \in A", False),
    (r"56, k \in A", r"56.0, k \in A", True), (r"\sqrt{2}, k \in A", r"\frac{2}{\sqrt{2}}, k \in A", True)])
def test_what_math_verify_accepts_is_checked_again(answer, given, equal):
    assert symbolic_equal(answer, given) is equal


def test_known_false_positives_of_last_number():
    assert verifiers.report("last_number").false_positives == [
        ("The answer is 2+3.", "3"), ("The answer is 5 or 6.", "6"),
        (r"The answer is \sqrt{2}.", "2"), (r"\boxed{1} \boxed{2} \boxed{}", "2"), ("The answer is not 5", "5"),
        ("It is 3, not 5", "5"), ("1 2 3 4 5 6 7 8 9", "9")]
