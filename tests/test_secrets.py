"""Secrets: which variables travel to other machines, and what is taken out of what is printed or written."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deepspeed_recipes.export.serve import environment as serving
from deepspeed_recipes.launching import command, kubernetes, paths, slurm
from deepspeed_recipes.launching.options import Allocation
from deepspeed_recipes.launching.ray import cluster
from deepspeed_recipes.launching.ssh.remote import launcher_environment
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.errors import UserError, check_no_credential, is_secret, redact, redacted
from deepspeed_recipes.recipe.run_folder import RunFolder, accept_recipe, append_jsonl, write_json, write_recipe
from deepspeed_recipes.training.console import Tee
from deepspeed_recipes.training.model_folder import record
from deepspeed_recipes.training.tracking import writer
from deepspeed_recipes.training.tracking.trackers import answers
from tests.launching import LAUNCH

# Put together here, so that no file holds what looks like a real one.
PASSWORD = "s3cr3t" + "Pa55"
SECRETS = {
    "user and password": f"ada:{PASSWORD}@proxy:3128",
    "a number as password": "ada:12345@proxy:3128",
    "token in a URL": f"https://{PASSWORD}@host/x.git",
    "password in a URL": f"https://ada:{PASSWORD}@host/x",
    "password with an @": f"https://ada:p@{PASSWORD}@host/x",
    "AWS's signed URL": f"https://b.s3/x?X-Amz-Date=1&X-Amz-Signature={PASSWORD}&x=1",
    "Azure's signed URL": f"https://b.blob/x?se=1&sig={PASSWORD}",
    "key in a URL": f"https://host/x?key={PASSWORD}",
    "token after a #": f"https://host/x#access_token={PASSWORD}",
    "in a file's text": f"hf_token={PASSWORD}",
    "in YAML": f"HF_TOKEN: {PASSWORD}",
    "in JSON": f'"api_key": "{PASSWORD}"',
    "in Python": f"'hf_token': '{PASSWORD}'",
    "Azure's connection": f"AccountName=a;AccountKey={PASSWORD}",
    "an option": f"--api-key {PASSWORD}",
    "an option with =": f"--token={PASSWORD}",
    "header": f"Authorization: Basic {PASSWORD}",
    "header of one word": f"X-API-KEY: {PASSWORD}",
    "basic": f"Basic {'aB1' * 6}==",
    "key in a URL, by another name": f"https://host/x?jwt={PASSWORD}",
    "password in an encoded URL": f"https%3A%2F%2Fada%3A{PASSWORD}%40host%2Fx",
    "quoted in YAML": f"api_key: '{PASSWORD}'",
    "JSON in a text": f'{{\\"api_key\\": \\"{PASSWORD}\\"}}',
    "Kaggle's file": f'{{"username": "ada", "key": "{"aB1" * 8}"}}',
    "curl's option": f"curl -u ada:{PASSWORD} https://host/x",
    "docker": f"docker login -u ada -p {PASSWORD} host",
    "in os.environ": f"os.environ['HF_TOKEN'] = '{PASSWORD}'",
    "xAI": f"xai-{PASSWORD * 5}",
    "Docker": f"dckr_pat_{PASSWORD * 3}",
    "LangSmith": f"lsv2_pt_{PASSWORD * 4}",
    "sshpass": f"sshpass -p {PASSWORD} ssh host",
    "mysql's option": f"mysql -u ada -p{PASSWORD} -h db",
    "mysqldump's option": f"mysqldump -p'{PASSWORD}' all",
    "a block in YAML": f"  password: |-\n    {PASSWORD}\n    {PASSWORD}\n",
    "a folded block in YAML": f"hf_token: >\n  {PASSWORD}\n",
    "passwort": f"passwort={PASSWORD}",
    "a number as passwort": "db_passwort=12345",
    "hexadecimal digits of a key": f"the encryption-key {'aB1' * 21}0",
    "hexadecimal digits of a secret": f"api_key {'aB1' * 21}0",
    "a variable's key": f"AZURE_STORAGE_KEY={PASSWORD}",
    "keys of a bucket": f"s3://{'AKIA' + 'AB12' * 4}:{PASSWORD}@bucket/x",
    "header as OTEL writes it": f"authorization=Bearer%20{PASSWORD}",
    "bearer": f"Bearer {PASSWORD}",
    "Hugging Face": "hf_" + "aB1" * 8,
    "Hugging Face, signed in": "hf_oauth_" + "aB1" * 8,
    "Stripe": "sk_live_" + "aB1" * 8,
    "Google, client": "GOCSPX-" + "aB1" * 9,
    "Discord": "https://discord.com/api/webhooks/1234/" + "aB1" * 20,
    "Neptune": "eyJ" + "aB1" * 20,
    "GitHub": "ghp_" + "aB1" * 12,
    "GitHub, fine-grained": "github_pat_" + "aB1" * 8,
    "GitLab": "glpat-" + "aB1" * 7,
    "AWS": "AKIA" + "AB12" * 4,
    "OpenAI": "sk-proj-" + "aB1" * 8,
    "Slack": "xoxb-" + "123-" * 4 + "abc",
    "Groq": "gsk_" + "aB1" * 10,
    "NVIDIA": "nvapi-" + "aB1" * 10,
    "JSON web token": "eyJ" + "aB1" * 4 + ".eyJ" + "aB1" * 4 + ".x",
    "PGP key": "-----BEGIN PGP PRIVATE KEY BLOCK-----\nMIIE" + "aB1" * 8 + "\n-----END PGP PRIVATE KEY BLOCK-----",
    "private key": "-----BEGIN RSA PRIVATE KEY-----\nMIIE" + "aB1" * 8 + "\n-----END RSA PRIVATE KEY-----",
}
PLAIN = (
    "http://proxy:3128",
    "node1@node2:0,2@node3",
    "--include n1:0,2@n2:10",
    "registry/image:tag@sha256:0123",
    "image:tag@sha256:0123",
    "tokens_per_second=4170 pad_token=<pad> max_new_tokens=5",
    "a task-force-of-many-long-words",
    "plan --tokens 2000000 --token-budget 12345678",
    "set WANDB_API_KEY: https://wandb.ai/authorize2",
    "HF_TOKEN: not set, and the password is needed",
    '{"pad_token": "<|pad|>", "eos_token": "<|end|>2"}',
    "ada@host:/path and ada@example.org",
    "step 160/164  loss 0.0025  lr 5.1e-06",
    "data.path=/a/b.jsonl learning_rate=2e-4 deepspeed=zero3.json",
    "https://host/x?page=2&keyboard=de",
    "/home/ada/.cache/huggingface",
    "Basic responsibilities; key: model.layers.31.mlp.up_proj, sort_key=loss_at_step_16",
    "-u ada --user ada --max-restarts 2",
    "mysql -u ada -p -P 3306 && mkdir -p/tmp/x",
    "password: |\nuser: ada",
    f"sha256 {'ab1' * 21}0  model.safetensors, key layers.0",
)


@pytest.mark.parametrize("kind", SECRETS)
def test_a_credential_is_taken_out_of_any_text_and_known_as_one(kind):
    secret = SECRETS[kind]
    assert is_secret("X", secret)
    shown = redact(f"before {secret} after", {})
    assert "***" in shown and shown.startswith("before ") and shown.endswith(" after")
    for hidden in (PASSWORD, "12345", "aB1aB1", "AB12AB12", "123-123"):
        assert hidden not in shown


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_credential_stays(text):
    assert redact(text, {}) == text and not is_secret("X", text)


@pytest.mark.parametrize(
    "name",
    [
        "DB_PASS",
        "PGPASSWORD",
        "MY_PW",
        "KEY_PASSPHRASE",
        "OTEL_EXPORTER_OTLP_HEADERS",
        "SENTRY_DSN",
        "X_API_KEY",
        "KAGGLE_KEY",
        "MYSQL_PWD",
        "GITHUB_PAT",
        "DOCKER_AUTH_CONFIG",
    ],
)
def test_a_name_can_mark_a_secret(name):
    assert is_secret(name, "x")
    assert redact(f"run with {name}=hunter2 x", {}) == f"run with {name}=*** x"
    assert redact("it was hunter2hunter2", {name: "hunter2hunter2"}) == "it was ***"


def test_other_names_mark_none():
    for name in (
        "TOKENIZERS_PARALLELISM",
        "GIT_ASKPASS",
        "AUTHOR",
        "PWD",
        "HF_HOME",
        "PASSENGERS",
        "OLDPWD",
        "sort_key",
    ):
        assert not is_secret(name, "x"), name


TRAVEL = {
    "NCCL_DEBUG": "INFO",
    "HF_HOME": "hf",
    "WANDB_PROJECT": "p",
    "OMP_NUM_THREADS": "2",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "https_proxy": "http://proxy:3128",
    "MINE": "1",
}
STAY = {
    "http_proxy": SECRETS["user and password"],
    "HF_ENDPOINT": SECRETS["token in a URL"],
    "WANDB_BASE_URL": SECRETS["AWS's signed URL"],
    "WANDB_NOTES": SECRETS["GitLab"],
    "HF_TOKEN": "x",
    "WANDB_API_KEY": "x",
    "MY_DB_PASS": PASSWORD,
}
UNLISTED = {
    "HF_SOMETHING": "x",
    "WANDB__EXTRA_HTTP_HEADERS": f'{{"a": "{PASSWORD}"}}',
    "TRANSFORMERS_X": "x",
    "MLFLOW_TRACKING_PASSWORD": PASSWORD,
    "EDITOR": "vi",
}
ENVIRONMENT = TRAVEL | STAY | UNLISTED | {"DS_RECIPES_FORWARD": "MINE, MY_DB_PASS,NOT_SET"}


def test_only_listed_variables_travel_and_none_with_a_credential():
    assert command.forwarded(ENVIRONMENT) == TRAVEL
    assert command.withheld(ENVIRONMENT) == sorted(STAY)


def test_the_old_name_of_a_variable_is_answered_with_the_new_one(monkeypatch):
    said = "DSR_FORWARD=MINE: this variable is now called DS_RECIPES_FORWARD; set that, and unset DSR_FORWARD."
    for read in (command.forwarded, command.withheld):
        with pytest.raises(UserError) as caught:
            read({"DSR_FORWARD": "MINE", "MINE": "1"})
        assert str(caught.value) == said
    assert command.forwarded({"DSR_FORWARD": "MINE", "DS_RECIPES_FORWARD": "MINE", "MINE": "1"}) == {"MINE": "1"}
    monkeypatch.delenv(serving.VARIABLE, raising=False)
    monkeypatch.setenv("DSR_SERVING", "elsewhere")
    with pytest.raises(UserError, match=r"^DSR_SERVING=elsewhere: this variable is now called DS_RECIPES_SERVING"):
        serving.require("no_such_package", "a test")


def test_scripts_manifests_and_pdsh_get_what_is_forwarded_and_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    environment = ENVIRONMENT | {"TORCH_EXTENSIONS_DIR": "/o", "PYTHONPATH": "/p"}
    script = slurm.script(Allocation("x", 1, 2, True), run, environment)
    file = Path(launcher_environment(run, environment)["DS_ENV_FILE"]).read_text()
    recipe = paths.locate(pages.find("tiny", "full"), kubernetes.MOUNT)
    options = {"image": "i", "volume": "v", "environment": environment}
    pods = kubernetes.manifests(Allocation("x", 1, 2, True), recipe, run, **options)
    for text in (script, file, *pods.values()):
        assert PASSWORD not in text and "aB1" not in text and not any(f"{name}=" in text for name in UNLISTED)
    for name, value in TRAVEL.items():
        assert f"export {name}={shlex.quote(value)}\n" in script and f"{name}={value}\n" in file
    job = list(yaml.safe_load_all(pods["job.yaml"]))[-1]
    env = {one["name"]: one.get("value") for one in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    here_only = {"OMP_NUM_THREADS", "HF_HOME"}
    assert {name: env[name] for name in TRAVEL if name not in here_only} == {
        name: value for name, value in TRAVEL.items() if name not in here_only
    }
    assert "MY_DB_PASS" in capsys.readouterr().out


def test_what_is_printed_and_written_holds_no_credential(tmp_path, monkeypatch, capsys):
    token = SECRETS["GitHub"]
    monkeypatch.setattr(sys, "argv", ["launch.py", f"model.path={token}", f"https://{PASSWORD}@host/x"])
    run = RunFolder(tmp_path)
    command.record(run, ["deepspeed", f"--x={token}"])
    with (tmp_path / "log").open("w") as log:
        Tee(sys.stdout, log).write(f"{SECRETS['AWS']}\n")
        log.flush()
    for text in (
        run.command.read_text(),
        capsys.readouterr().out.replace(SECRETS["AWS"], ""),
        Path(log.name).read_text(),
    ):
        assert "***" in text or not text.strip()
        assert token not in text and PASSWORD not in text and SECRETS["AWS"] not in text
    done = subprocess.run([*LAUNCH, "tiny", "full", f"data.path={token}.jsonl"], capture_output=True, text=True)
    assert done.returncode == 2 and "***" in done.stderr and token not in done.stderr
    assert json.dumps(token) not in done.stdout


KEYS = ("password", "db_password", "api_key", "token", "hub_token", "AWS_SECRET_ACCESS_KEY", "session_token", "key")


def test_a_settings_key_can_mark_a_secret():
    held = {key: "hunter2" for key in KEYS} | {"list": [{"token": "hunter2"}], "url": f"https://a:{PASSWORD}@h/x"}
    shown = redacted(held)
    assert "hunter2" not in str(shown) and PASSWORD not in str(shown) and set(shown) == set(held)
    inside = redacted({"password": {"x": "hunter2"}, f"https://a:{PASSWORD}@h": 1, "u": "https://h/x?pw=hunter2"})
    assert "hunter2" not in str(inside) and PASSWORD not in str(inside) and len(inside) == 3
    assert redacted({"u": "https://ada:hun/ter2@h/x"}) == {"u": "https://***@h/x"}
    assert redacted({"u": "http://h:8000/v1/a@b"}) == {"u": "http://h:8000/v1/a@b"}, "a port, not a password"
    plain = {"pad_token": "<pad>", "tokens": 5, "keys": ["a"], "tokenizer": "x", "token": "", "password": None}
    assert redacted(plain) == plain and check_no_credential(plain, "") is None
    with pytest.raises(UserError, match=r"^a\.b\.api_key=\*\*\*: its credential could be read here; leave it out"):
        check_no_credential({"a": {"b": {"api_key": "hunter2"}}}, "here")


def secret_recipe(*more):
    words = [f"grpo.vllm=http://ada:{PASSWORD}@10.0.0.1:8000", f"wandb.tags={SECRETS['Hugging Face']}"]
    return overrides.apply(pages.find("tiny", "grpo"), [*words, *more])


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "mlflow", "trackio"])
def test_no_tracker_gets_a_credential_or_a_text_of_the_data(name, tmp_path, monkeypatch, capsys):
    pytest.importorskip(name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    recipe, run = secret_recipe("wandb.mode=offline", f"tracking={name}"), RunFolder(tmp_path)
    write_recipe(run, recipe)
    for step in (0, 9):
        append_jsonl(run.answers, {"step": step, "prompt": "PRIVATE", "expected": "PRIVATE", "answer": f"{step}"})
    ours = set(contents(tmp_path))
    tracked = writer.opened(name, recipe, run, {"comet": {"api_key": PASSWORD}})
    print(f"on the way: http://ada:{PASSWORD}@10.0.0.1")
    tracked.record(1, {"loss": 1.0, "tokens": 5.0})
    assert answers(run) == []
    tracked.finish({}, 0)
    theirs = {path: found for path, found in contents(tmp_path).items() if path not in ours}
    assert any(b"10.0.0.1" in found for found in theirs.values()), "the recipe is there"
    for path, found in theirs.items():
        for hidden in (PASSWORD, SECRETS["Hugging Face"], "PRIVATE"):
            assert hidden.encode() not in found, path
    write_recipe(run, secret_recipe("wandb.examples=true"))
    accept_recipe(run)
    assert answers(run) == [["PRIVATE", "PRIVATE", "0", "9"]]


def test_what_an_export_tells_of_its_training_has_no_credential(tmp_path):
    write_json(tmp_path / "ds.json", {"comet": {"api_key": PASSWORD}, "url": f"https://{PASSWORD}@host"})
    record.write(tmp_path, record.Record(secret_recipe(), {}), tmp_path / "ds.json")
    for path, found in contents(tmp_path / record.FOLDER).items():
        assert PASSWORD.encode() not in found and SECRETS["Hugging Face"].encode() not in found, path
    assert "***" in record.read(tmp_path).recipe.method.vllm


def test_a_job_that_others_can_read_is_given_no_credential():
    with pytest.raises(UserError, match=r"(tags|vllm)=\S*\*\*\*\S*: its credential could be read in the job"):
        kubernetes.files(secret_recipe())
    with pytest.raises(UserError, match=r"grpo\.vllm=http://\*\*\*@h: its credential could be read in the Ray"):
        cluster.submit_job("http://a", ["tiny", "grpo", f"grpo.vllm=http://ada:{PASSWORD}@h"], submit=False)
