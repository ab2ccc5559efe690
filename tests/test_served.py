"""The table of what servers answer: a difference, a refusal or what was not run is never shown as a number."""

from scripts.maintain import served


def cells(results):
    return served.table(results).splitlines()[2].split(" | ")[1:4]


def test_only_an_agreement_shows_its_difference():
    one = {"version": "vllm 1", "difference": 0.0012, "bound": 0.002}
    differs = one | {"verdict": "differs", "difference": 0.3, "why": ""}
    refused = {"version": "vllm 1", "verdict": "refused", "why": "merge it"}
    found = {"full": {"transformers": one | {"verdict": "agrees"}}, "lora": {"transformers": differs}}
    assert cells({"tiny": found}) == ["1e-03", "**differs** (1)", "-"]
    assert cells({"tiny": found | {"full": {"transformers": refused}}})[0] == "no (1)"
    text = served.table({"tiny": found})
    assert "1. the folder shows no cause" in text and "Not run: " in text and "llama3" in text
