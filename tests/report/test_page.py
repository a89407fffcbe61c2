"""Tests of report.html: its text, its order, and that it is self-contained."""

import copy
import json
import re
from html.parser import HTMLParser

import pytest
import torch

import evenclip
from evenclip import files
from evenclip.cli import main
from evenclip.data import Dataset, Splits
from evenclip.report import charts, words
from evenclip.report.page import NEEDED, WARNING, page


def dataset(n, seed):
    random = torch.Generator().manual_seed(seed)
    group = torch.arange(n) % 2
    x = torch.randn(n, 4, generator=random)
    y = (x[:, 0] + (0.4 + 0.3 * group) * torch.randn(n, generator=random) > 0).long()
    return Dataset(x, y, group, ("women", "men"), ("no", "yes"), "made")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, here):
    """Return the results of a real comparison, as in results.json."""
    comparison = evenclip.compare(
        Splits(dataset(400, 0), dataset(300, 1), dataset(100, 2)),
        seeds=3,
        epochs=3,
        batch_size=50,
        delta=1e-4,
        model="mlp:8",
        store=tmp_path_factory.mktemp("store"),
        on=here,
    )
    return json.loads(json.dumps(comparison.to_json()))


@pytest.fixture
def results(whole):
    return copy.deepcopy(whole)


def cost(results, rule, women, men, gap):
    row = results["table"][rule]
    row["privacy_cost"] = {"women": {"mean": women, "se": 0.1}, "men": {"mean": men, "se": 0.1}}
    row["privacy_cost_gap"] = {"mean": gap, "se": 0.1}


def with_known_numbers(results):
    """Set known numbers in the results."""
    cost(results, "dpsgd", 3.62, 10.58, 6.96)
    cost(results, "dpsgd-f", 2.0, 3.0, 1.0)
    cost(results, "dpsgd-global", 2.0, 4.0, 2.0)
    cost(results, "dpsgd-global-adapt", 0.12, -0.04, 0.16)
    for rule, epsilon in (("dpsgd", 2.9951), ("dpsgd-global-adapt", 2.9999)):
        results["privacy"][rule]["epsilon_pld"] = epsilon
    results["verdict"]["dpsgd-global-adapt"] |= {
        "mean": -6.8,
        "low": -7.9,
        "high": -5.7,
        "p": 0.0004,
        "p_rank": 0.09375,
        "reads": "smaller by 6.8 (5.7 to 7.9)",
    }
    return results


# --- the answer ---


def test_the_answer_is_one_sentence_with_its_interval(results):
    first, second = words.answer(with_known_numbers(results))
    assert first == (
        "At ε = 3, DPSGD costs women 3.6 points of accuracy and men 10.6; DPSGD-Global-Adapt "
        "costs 0.1 and 0.0."
    )
    assert second == (
        "The gap between the groups is 6.8 points smaller with DPSGD-Global-Adapt than with DPSGD "
        "(95\u00a0% interval 5.7 to 7.9, p below 0.001 corrected for all rules, over 3 seeds)."
    )


def test_an_epsilon_is_never_rounded_down(results):
    results = with_known_numbers(results)
    results["privacy"]["dpsgd"]["epsilon_pld"] = 3.0001
    assert words.answer(results)[0].startswith("At ε = 3.01 and 3, ")


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        ({"reads": "no difference shown", "low": -1.0, "high": 2.0},
         "Between the gaps of DPSGD-Global-Adapt and DPSGD no difference is shown with 3 seeds."),
        ({"reads": "too few seeds to tell", "low": None, "high": None},
         "Whether the gap of DPSGD-Global-Adapt differs from DPSGD's: "
         "too few seeds to tell (3 seeds)."),
        ({"reads": "no verdict below 5 seeds; the difference is 2 (-1 to 5)", "mean": 2.0,
          "low": -1.0, "high": 5.0},
         "With 3 seeds there is no verdict: the gap between the groups is 2.0 points larger with "
         "DPSGD-Global-Adapt than with DPSGD, 95\u00a0% interval of the difference −1.0 to 5.0. A "
         "verdict needs five seeds."),
        ({"mean": 2.0, "reads": "larger by 2 (1 to 3)", "low": 1.0, "high": 3.0, "p": 0.021},
         "The gap between the groups is 2.0 points larger with DPSGD-Global-Adapt than with DPSGD "
         "(95\u00a0% interval 1.0 to 3.0, p = 0.021 corrected for all rules, over 3 seeds)."),
    ],
)  # fmt: skip
def test_what_is_not_shown_is_not_said(results, verdict, sentence):
    results = with_known_numbers(results)
    results["verdict"]["dpsgd-global-adapt"] |= verdict
    assert words.answer(results)[1] == sentence


def test_the_page_has_every_rule_s_verdict_with_both_p(results):
    results = with_known_numbers(results)
    drawn = page(results)
    assert (
        '<th scope="row">DPSGD-Global-Adapt</th><td>−6.8</td><td>−7.9 to −5.7</td>'
        "<td>&lt; 0.001</td><td>0.094</td><td>smaller</td>"
    ) in drawn
    assert drawn.count("no verdict below 5 seeds</td>") == 2  # the other rules have three seeds
    results["verdict"] = {}
    assert "signed rank" not in page(results)


def test_without_a_valid_epsilon_there_is_no_price(results):
    for privacy in results["privacy"].values():
        privacy["epsilon_pld"] = None
    assert words.answer(results) == [
        "No rule of this comparison has a valid ε, so there is no price of privacy to tell."
    ]
    assert "ε =" not in page(results).split("</header>")[0]


def test_a_rule_alone_and_a_rule_of_ones_own(results):
    results = with_known_numbers(results)
    for name in ("dpsgd", "dpsgd-f", "dpsgd-global"):
        for what in ("table", "privacy", "settings", "course", "statement"):
            del results[what][name]
    assert re.fullmatch(
        r"At ε = [\d.]+, DPSGD-Global-Adapt costs women 0.1 .* and men 0.0\.",
        words.answer(results)[0],
    )
    for what in ("table", "privacy", "settings", "course", "statement"):
        results[what]["halves"] = results[what].pop("dpsgd-global-adapt")
    drawn = page(results)
    assert "halves costs women" in drawn
    assert "A custom rule." in drawn


def test_of_many_groups_the_pair_or_those_that_pay_least_and_most(results):
    results = with_known_numbers(results)
    cells = {
        name: {"mean": value, "se": 0.1}
        for name, value in zip("abcd", (5.0, 1.0, 3.0, 9.0), strict=True)
    }
    for row in results["table"].values():
        row["privacy_cost"] = cells
    results["groups"] = list("abcd")
    assert "costs b 1.0 points of accuracy and d 9.0;" in words.answer(results)[0]
    results["small_groups"] = ["d"]
    assert "costs b 1.0 points of accuracy and a 5.0;" in words.answer(results)[0]
    named = json.loads(json.dumps(results).replace('"b"', '"8"'))
    assert "costs group 8 1.0 points of accuracy and a 5.0;" in words.answer(named)[0]
    results["pair"] = ["c", "d"]
    assert "costs c 3.0 points of accuracy and d 9.0;" in words.answer(results)[0]


def test_only_matched_steps_are_said_to_be_matched(results):
    assert results["protocol"] == "matched"
    for equal in ("matched", "given"):
        results["protocol"] = equal
        assert not any("how far they step" in text for text in words.limits(results))
    results["protocol"] = "published"
    assert any("how far they step, and not how they clip" in text for text in words.limits(results))


# --- the page ---


class Outline(HTMLParser):
    """Collects headings, open tags, ids and external references."""

    def __init__(self):
        super().__init__()
        self.headings, self.open, self.refers, self.ids, self._in = [], [], [], [], None

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.refers += [
            v for k, v in attrs if k in ("src", "href", "xlink:href", "action", "data", "srcset")
        ]
        if "id" in given:
            self.ids.append(given["id"])
        if tag not in ("meta", "line", "circle", "path", "rect", "polyline"):
            self.open.append(tag)
        if tag in ("h1", "h2", "h3"):
            self._in = tag
            self.headings.append("")

    def handle_startendtag(self, tag, attrs):
        self.refers += [v for k, v in attrs if k in ("src", "href")]

    def handle_data(self, data):
        if self._in:
            self.headings[-1] += data

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == self._in:
            self._in = None


def outline(text):
    found = Outline()
    found.feed(text)
    assert found.open == []
    return found


def test_the_page_stands_alone_and_in_order(results):
    text = page(with_known_numbers(results))
    found = outline(text)
    assert found.headings[1:7] == [
        "What this does not say",
        "The table",
        "Pictures",
        "Privacy statement",
        "How each method works",
        "Settings",
    ]
    assert found.headings[0].startswith("At ε = 3, DPSGD costs women")
    assert found.refers == []
    assert len(set(found.ids)) == len(found.ids)
    assert not re.search(r"<script|@import|url\(|https?:|<link|<iframe|javascript:", text)
    assert len(text.encode()) < 400_000
    assert text.index(WARNING.split(".")[0]) < text.index("<table")
    assert "prefers-color-scheme:dark" in text
    assert "@media print" in text


def test_names_of_groups_are_text_and_nothing_else(results):
    evil = '<script>alert("1")</script>&'
    text = json.dumps(results).replace('"women"', json.dumps(evil))
    drawn = page(json.loads(text))
    assert "<script" not in drawn
    assert "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;" in drawn
    outline(drawn)


def test_every_number_of_the_table_is_there_and_the_best_private_one_is_marked(results):
    results = with_known_numbers(results)
    text = page(results)
    rows = re.search(r"points of accuracy lost against.*?</table>", text, re.S)[0]
    assert re.search(
        r"DPSGD</th><td>3.6 <span>± 0.1</span></td><td>10.6 <span>± 0.1</span></td><td>7.0 ", rows
    )
    best = (
        r"DPSGD-Global-Adapt</th><td><strong>0.1 .*?</strong></td><td><strong>0.0 "
        r".*?</strong></td><td><strong>0.2 "
    )
    assert re.search(best, rows)
    assert "Non-private" not in rows
    losses = re.search(r"Loss on test records.*?</table>", text, re.S)[0]
    for rule in results["table"]:
        for group in ("women", "men"):
            assert f"{results['table'][rule]['loss'][group]['mean']:.3f}" in losses
    assert not re.search(r"Non-private</th><td><strong>", losses)  # it has no ε


def test_the_statement_has_every_field_of_the_report(results):
    statement = page(results).split('id="statement"')[1].split("</section>")[0]
    one = results["statement"]["dpsgd-global-adapt"]
    shown_elsewhere = {"method", "rule", "reference", "versions", "n"}
    for name, value in one.items():
        if name in shown_elsewhere or value is None:
            continue
        if isinstance(value, list):
            assert all(text in statement for text in (v.replace("'", "&#x27;") for v in value)), (
                name
            )
        elif isinstance(value, str) and name != "specification":
            assert value.replace("'", "&#x27;") in statement, name
    for text in results["not_covered_by_epsilon"]:
        assert text.rstrip(".") in statement
    assert one["specification"][:16] in statement
    assert f"<td>{evenclip.mechanism.accounting.rounded_up(one['epsilon'])}</td>" in statement


def test_multipliers_that_differ_between_steps_are_shown_as_a_range(results):
    results["statement"]["dpsgd"] |= {
        "multipliers": {"gradient": [1.0, 1.18]}, "joint_multiplier": [1.0, 1.18],
    }  # fmt: skip
    statement = page(results).split('id="statement"')[1].split("</section>")[0]
    assert '<th scope="row">noise multipliers</th><td>gradient 1 to 1.18</td>' in statement
    assert '<th scope="row">joint noise multiplier</th><td>1 to 1.18</td>' in statement


def test_a_rule_without_an_epsilon_has_none_and_says_why(results):
    results["statement"]["dpsgd"] |= {
        "epsilon": None,
        "epsilon_rdp": None,
        "epsilon_without_amplification": None,
        "soundness": "no valid ε",
        "why_no_epsilon": "it was invented for this test",
    }
    statement = page(results).split('id="statement"')[1].split("</section>")[0]
    assert '<th scope="row">ε, by PLD</th><td>none</td>' in statement
    assert '<th scope="row">δ</th><td>–</td><td>0.0001</td>' in statement
    assert "it was invented for this test" in statement


def test_pictures_are_drawn_of_what_there_is(results):
    text = page(results)
    for title in (
        "Accuracy by group",
        "Privacy cost by group",
        "Training loss by group",
        "Length of gradients by group",
    ):
        assert f"<figcaption>{title}</figcaption><svg" in text
    assert "Z of DPSGD-Global-Adapt" in text
    assert "Bounds of DPSGD-F by group" in text
    assert "Risk by direction" not in text
    results["risk"] = {
        "dpsgd": [{"dir": [0.1, 0.2], "mag": [0.3, 0.4]}, {"dir": [0.1, 0.1], "mag": [0.1, 0.1]}]
    }
    assert "Risk by direction" in page(results)


def test_an_interval_ends_where_no_accuracy_can_be(results):
    results["table"]["dpsgd"]["accuracy"]["men"] = {"mean": 97.0, "se": 20.0}
    (svg,) = re.findall(r"<figcaption>Accuracy by group</figcaption>(<svg.*?</svg>)", page(results))
    ticks = [float(t) for t in re.findall(r'class="tick"[^>]*>([\d.−]+)<', svg)]
    assert max(ticks) == 100
    assert min(ticks) >= 0


def test_one_seed_one_epoch_and_what_is_not_a_number(results):
    for row in results["table"].values():
        for metric in row.values():
            for cell in metric.values() if "mean" not in metric else [metric]:
                cell["se"] = None
    results["table"]["dpsgd"]["accuracy"]["men"]["mean"] = None
    for course in results["course"].values():
        for name, values in course.items():
            course[name] = values and values[:1]
        course["loss"] = [[None, 0.5]]
    drawn = page(results)
    outline(drawn)
    assert "nan" not in drawn.lower().replace("finance", "")
    assert "<td>–</td>" in drawn


@pytest.mark.parametrize("name", NEEDED)
def test_results_of_something_else_are_refused(results, name):
    del results[name]
    with pytest.raises(ValueError, match=f"There is no '{name}' in these results; make them again"):
        page(results)


def test_many_groups_are_not_drawn_on_top_of_each_other(results):
    names = [f"g{i}" for i in range(charts.MOST_GROUPS + 3)]
    for row in results["table"].values():
        for metric in ("accuracy", "loss", "privacy_cost"):
            row[metric] = {name: {"mean": 1.0, "se": 0.1} for name in names}
    for course in results["course"].values():
        for metric in ("loss", "gradient_norm"):
            course[metric] = [[1.0] * len(names)] * 3
        course["state"] = None
    results["groups"] = names
    drawn = page(results)
    assert f"Of {len(names)} groups these are drawn: g0, g1" in drawn
    assert f'class="g{charts.MOST_GROUPS} ' not in drawn


def test_many_groups_stand_below_each_other(results):
    names = list("abcdefgh")
    for i, row in enumerate(results["table"].values()):
        row["accuracy"] = {name: {"mean": 10.0 * i + k, "se": None} for k, name in enumerate(names)}
        row["loss"] = row["privacy_cost"] = row["accuracy"]
    for course in results["course"].values():
        course |= {"loss": [[1.0] * 8] * 3, "gradient_norm": [[1.0] * 8] * 3, "state": None}
    results["groups"] = names
    table = re.search(r"Accuracy on test records.*?</table>", page(results), re.S)[0]
    assert (
        '<th scope="col">Group</th><th scope="col">Non-private</th><th scope="col">DPSGD</th>'
        in table
    )
    private = "<td>10.0</td><td>20.0</td><td>30.0</td><td><strong>40.0</strong></td>"
    assert f'<tr><th scope="row">a</th><td>0.0</td>{private}</tr>' in table
    assert table.count('scope="row"') == 8


# --- pictures ---


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-3.2, 11.7), (71.0, 92.0), (1e-6, 3e-6), (5.0, 5.0), (-2, -1)]
)
def test_a_scale_has_round_ends_around_the_values(low, high):
    first, last, ticks = charts._scale(low, high)
    assert first <= low
    assert high <= last
    assert 3 <= len(ticks) <= 7
    assert ticks[0] == pytest.approx(first)
    assert ticks[-1] == pytest.approx(last)


def test_markers_stand_at_their_values():
    svg = charts.dots(
        "t", "d", "points", [("a", [charts.Dot(0.0, -1.0, 1.0), charts.Dot(4.0, None, None)])]
    )
    x = {
        float(v): k
        for k, v in re.findall(r'class="g(\d) mark"><(?:circle cx="|path d="M)([\d.]+)', svg)
    }
    zero, four = sorted(x)
    low, high = (
        float(v)
        for v in re.search(r'class="g0" stroke-width="2" x1="([\d.]+)" x2="([\d.]+)"', svg).groups()
    )
    assert (low + high) / 2 == pytest.approx(zero, abs=0.1)
    assert four - zero == pytest.approx(4 * (high - zero), abs=0.5)
    assert charts.dots("t", "d", "points", [("a", [charts.Dot(None, None, None)])]) == ""


# --- the verb ---


def test_report_writes_the_page_beside_the_results(results, tmp_path, capsys):
    (tmp_path / "results.json").write_bytes(files.sealed(results))
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(tmp_path)])
    assert stopped.value.code == 0
    assert (tmp_path / "report.html").read_text() == page(json.loads(json.dumps(results)))
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")


def test_changed_results_are_drawn_only_with_a_mark(results, tmp_path, capsys):
    written = files.sealed(results)
    assert b'"epsilon_pld": 3' in written or b'"epsilon_pld": 2.9' in written
    changed = re.sub(rb'"epsilon_pld": [0-9.]+', b'"epsilon_pld": 0.1', written)
    (tmp_path / "results.json").write_bytes(changed)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(tmp_path)])
    assert stopped.value.code == 2
    assert not (tmp_path / "report.html").exists()
    assert capsys.readouterr().err == (
        f"evenclip: {tmp_path / 'results.json'} is damaged or was changed: its checksum does not "
        "match its content; make it again with `evenclip compare --out`, or pass --unverified.\n"
    )
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(tmp_path), "--unverified"])
    assert stopped.value.code == 0
    drawn = (tmp_path / "report.html").read_text()
    assert drawn.index("<strong>Not verified.</strong>") < drawn.index("<h1>")


def test_results_of_another_shape_are_one_sentence(results, tmp_path, capsys):
    """Also with the right checksum, as of a forger or another version."""
    for name in NEEDED:
        for value in (None, 3, "text", [], {}, [[]], {"a": {}}):
            (tmp_path / "results.json").write_bytes(files.sealed({**results, name: value}))
            with pytest.raises(SystemExit) as stopped:
                main(["report", str(tmp_path)])
            said = capsys.readouterr().err
            assert stopped.value.code in (0, 2)
            assert "Traceback" not in said
            assert said == "" or (said.startswith("evenclip: ") and said.endswith(".\n"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        (b"{", "is damaged (no JSON: "),
        (b"[" * 10**5, "is damaged (no JSON: nested too deep)"),
        (b"\xff\xfe", "is damaged (no JSON: "),
        (b"[]", "is damaged (no JSON object)"),
        (b"{}", "has no checksum"),
        (files.sealed({}), "There is no 'dataset'"),
    ],
)
def test_what_is_no_result_is_one_sentence(content, says, tmp_path, capsys):
    if content is not None:
        (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(tmp_path)])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / "report.html").exists()
