"""`load_config`: composition, overrides, and one line for each way to get it wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_sspo.config import load_config, load_run_config, to_yaml
from nemo_sspo.errors import UserError


def error(*overrides: str, name: str = "tiny_moe_cpu", config_dir: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_config(name, overrides, config_dir)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def write(tmp_path: Path, repository: Path):
    """Write `conf/mine.yaml` with the tiny config's text and something appended; returns the folder."""

    def write(text: str, name: str = "mine.yaml", base: str = "") -> Path:
        folder = tmp_path / "conf"
        folder.mkdir(exist_ok=True)
        before = (repository / "conf" / base).read_text() if base else ""
        (folder / name).write_text(before + text)
        return folder

    return write


class TestOverrides:
    def test_values_and_types(self, tiny):
        config = tiny("model.seed=2", "model.optim.lr=1e-4", "model.qk_layernorm=false", "trainer.precision=bf16")
        assert (config.model.seed, config.model.optim.lr) == (2, 1e-4)
        assert (config.model.qk_layernorm, config.trainer.precision) == (False, "bf16")

    def test_a_key_that_the_file_leaves_out_needs_no_plus(self, tiny):
        assert tiny("trainer.grpo.num_logged_samples=9").trainer.grpo.num_logged_samples == 9

    @pytest.mark.parametrize("sign", ["", "+", "++"])
    def test_plus_signs_set_the_value(self, tiny, sign):
        assert tiny(f"{sign}model.seed=3").model.seed == 3

    def test_a_number_for_a_text_key_becomes_text(self, tiny):
        assert tiny("trainer.precision=32").trainer.precision == "32"

    def test_tilde_restores_the_default(self, tiny):
        assert tiny().trainer.sft.max_steps > 0
        assert tiny("~trainer.sft").trainer.sft.max_steps == 0
        assert tiny("~model.rotary_base").model.rotary_base == 1_000_000.0

    def test_lists_replace(self, tiny):
        config = tiny("model.optim.betas=[0.8,0.95]", "model.data.data_prefix.train=[a.jsonl,'b c.jsonl']")
        assert config.model.optim.betas == [0.8, 0.95]
        assert config.model.data.data_prefix.train == ["a.jsonl", "b c.jsonl"]

    def test_a_section_merges(self, tiny):
        optim = tiny("model.optim={lr: 0.5, eps: 1e-6}").model.optim
        assert (optim.lr, optim.eps, optim.betas) == (0.5, 1e-6, [0.9, 0.98])

    def test_null(self, tiny):
        config = tiny("model.grpo.objective={tau_pos: 2, tau_neg: 3}", "model.grpo.objective.tau_pos=null")
        objective = config.model.grpo.objective
        assert (objective.tau_pos, objective.tau_neg) == (None, 3.0)

    def test_interpolation(self, tiny):
        assert tiny("model.optim.lr=${model.sft.optim.lr}", "model.sft.optim.lr=0.25").model.optim.lr == 0.25

    def test_the_last_one_wins(self, tiny):
        assert tiny("model.seed=2", "model.seed=5").model.seed == 5


class TestBadOverrides:
    @pytest.mark.parametrize(
        ("override", "meant"),
        [
            ("model.sed=2", "did you mean model.seed?"),
            ("modle.seed=2", "did you mean model.seed?"),
            ("lr=1", "did you mean model.optim.lr"),
            ("trainer.max_steps=3", "did you mean trainer.sft.max_steps or trainer.grpo.max_steps?"),
            ("+model.grpo.objective.gaet=siglog", "did you mean model.grpo.objective.gate?"),
            ("~model.data.syntetic", "did you mean model.data.synthetic?"),
            ("model.optim={lr: 1, bets: [0.9, 0.9]}", "did you mean model.optim.betas?"),
            ("=1", "the top level has: trainer, exp_manager, pretrained_checkpoint, model"),
            ("xyz=1", "the top level has: trainer, exp_manager, pretrained_checkpoint, model"),
        ],
    )
    def test_unknown_key(self, override, meant):
        message = error(override)
        assert message.startswith(f"override {override!r}: there is no key ")
        assert meant in message

    def test_unknown_key_names_itself_and_not_its_section(self):
        assert "there is no key model.optim.bets;" in error("model.optim={bets: 1}")

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("model.seed=abc", "model.seed: got 'abc', expected int (from the override model.seed=abc)"),
            ("model.seed=1.5", "model.seed: got 1.5, expected int"),
            ("model.seed=null", "model.seed: got null, expected int"),
            ("model.seed=true", "model.seed: got true, expected int"),
            ("model.qk_layernorm=maybe", "model.qk_layernorm: got 'maybe', expected bool"),
            ("model.grpo.objective.tau_pos=hot", "model.grpo.objective.tau_pos: got 'hot', expected float or null"),
            ("model.optim.betas=[0.9,x]", "model.optim.betas: got [0.9, 'x'], expected list of float"),
            ("model.optim=3", "model.optim: got 3, expected a section with keys of its own"),
            ("model.sft=null", "model.sft: got null, expected a section with keys of its own"),
        ],
    )
    def test_wrong_type(self, override, message):
        assert error(override).startswith(message)

    def test_one_file_where_a_list_belongs_shows_the_list(self):
        message = error("model.data.data_prefix.train=a.jsonl")
        assert "expected list of str or null" in message
        assert message.endswith("for example model.data.data_prefix.train=[a.jsonl]")

    @pytest.mark.parametrize("override", ["model.seed", "model.seed=[1", "--model.seed=1", ""])
    def test_syntax(self, override):
        message = error(override)
        assert message.startswith(f"override {override!r}: ")
        assert "write key=value" in message

    def test_sweep(self):
        assert "model.seed=1,2': a sweep over several values is not one run" in error("model.seed=1,2")

    def test_missing_value_names_every_key(self):
        message = error("~model.num_layers", "~model.optim.lr")
        assert message.startswith("no value for model.num_layers, model.optim.lr; ")
        assert message.endswith("as in model.num_layers=<int>")

    def test_interpolation_of_an_unknown_key(self):
        assert "Interpolation key 'model.foo' not found" in error("model.optim.lr=${model.foo}")


class TestFiles:
    def test_unknown_name_lists_those_that_exist(self, write):
        message = error(name="tiny", config_dir=write("", "other.yaml"))
        assert message.startswith(
            "--config-name: no config named 'tiny'; those that exist: other, qwen3_30b_a3b_sspo, tiny_moe_cpu ("
        )

    def test_config_dir_comes_first(self, write):
        folder = write("", "tiny_moe_cpu.yaml", base="tiny_moe_cpu.yaml")
        text = (folder / "tiny_moe_cpu.yaml").read_text()
        (folder / "tiny_moe_cpu.yaml").write_text(text.replace("seed: 1234", "seed: 77"))
        assert load_config("tiny_moe_cpu", config_dir=folder).model.seed == 77

    def test_conf_in_the_working_folder(self, write, monkeypatch):
        folder = write("", base="tiny_moe_cpu.yaml")
        monkeypatch.chdir(folder.parent)
        assert load_config("mine").model.num_layers == 3

    def test_the_checkout_serves_from_any_working_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert load_config("tiny_moe_cpu").model.num_layers == 3

    @pytest.mark.parametrize("name", ["tiny_moe_cpu", "tiny_moe_cpu.yaml"])
    def test_suffix_is_optional(self, name):
        assert load_config(name).model.num_layers == 3

    def test_path_instead_of_name(self, repository):
        assert "--config-dir" in error(name=str(repository / "conf" / "tiny_moe_cpu.yaml"))
        assert "--config-dir" in error(name="../conf/tiny_moe_cpu")

    def test_config_dir_that_is_no_folder(self, tmp_path):
        assert error(config_dir=tmp_path / "nope").startswith(f"--config-dir: {tmp_path / 'nope'} is not a folder")

    def test_defaults_list_reaches_the_other_folders(self, write):
        folder = write("defaults: [tiny_moe_cpu, _self_]\nmodel: {seed: 8}\n")
        config = load_config("mine", ["model.num_layers=2"], folder)
        assert (config.model.seed, config.model.num_layers, config.model.hidden_size) == (8, 2, 96)

    def test_group(self, write):
        folder = write("defaults: [tiny_moe_cpu, model/optim: slow, _self_]\n")
        (folder / "model" / "optim").mkdir(parents=True)
        (folder / "model" / "optim" / "slow.yaml").write_text("lr: 1e-7\n")
        (folder / "model" / "optim" / "fast.yaml").write_text("lr: 0.125\n")
        assert load_config("mine", [], folder).model.optim.lr == 1e-7
        assert load_config("mine", ["model/optim=fast"], folder).model.optim.lr == 0.125

    def test_defaults_list_names_a_file_that_is_not_there(self, write):
        folder = write("defaults: [nothing_here, _self_]\n")
        assert "nothing_here" in error(name="mine", config_dir=folder)

    def test_unknown_key_says_file_and_line(self, write):
        folder = write("defaults: [tiny_moe_cpu, _self_]\nmodel:\n  seed: 8\n  num_layer: 3\n")
        message = error(name="mine", config_dir=folder)
        assert message == (
            f"there is no key model.num_layer (in {folder.resolve()}/mine.yaml:4); did you mean model.num_layers?"
        )

    def test_several_unknown_keys(self, write):
        folder = write("defaults: [tiny_moe_cpu, _self_]\nmodel: {precison: 1, foo: 2}\n")
        assert error(name="mine", config_dir=folder).endswith("unknown beside it: foo")

    def test_wrong_type_says_file_and_line(self, write):
        folder = write("defaults: [tiny_moe_cpu, _self_]\ntrainer:\n  grpo:\n    max_steps: many\n")
        message = error(name="mine", config_dir=folder)
        assert message.startswith("trainer.grpo.max_steps: got 'many', expected int (in ")
        assert message.endswith("mine.yaml:4)")

    def test_wrong_type_in_an_included_file(self, write):
        write("trainer: {grpo: {max_steps: many}}\n", "base.yaml")
        folder = write("defaults: [tiny_moe_cpu, base, _self_]\n")
        assert error(name="mine", config_dir=folder).endswith("mine.yaml or a file that it includes)")

    @pytest.mark.parametrize(
        ("text", "line"), [("model:\n  seed: [1\n", 3), ("a: 1\nb: {\n", 3), ("a: 1\na: 2\n", 2), ("\tx: 1\n", 1)]
    )
    def test_bad_yaml_says_file_and_line(self, write, text, line):
        message = error(name="mine", config_dir=write(text))
        assert f"mine.yaml:{line}: not valid YAML: " in message

    def test_bad_yaml_in_an_included_file(self, write):
        write("model: [\n", "base.yaml")
        assert "base.yaml:2: not valid YAML" in error(name="mine", config_dir=write("defaults: [base, _self_]\n"))

    @pytest.mark.parametrize("text", ["- 1\n- 2\n", "just text\n"])
    def test_yaml_that_is_no_mapping(self, write, text):
        assert "mine" in error(name="mine", config_dir=write(text))

    def test_file_that_is_not_utf8(self, write):
        folder = write("")
        (folder / "mine.yaml").write_bytes(b"model: \xff\xfe\n")
        assert "mine.yaml" in error(name="mine", config_dir=folder)

    def test_empty_file_lists_the_mandatory_keys(self, write):
        message = error(name="mine", config_dir=write(""))
        assert message.startswith(
            "no value for trainer.grpo.max_steps, exp_manager.explicit_log_dir, model.num_layers, "
        )


class TestRunFolder:
    def test_round_trip(self, tiny, tmp_path):
        config = tiny(
            "model.data.data_prefix.train=[a.jsonl]", "model.grpo.objective.tau_pos=0.1", "trainer.precision=32"
        )
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        assert load_run_config(tmp_path) == config

    def test_not_a_run(self, tmp_path):
        with pytest.raises(UserError, match=r"not a run's folder \(it has no config\.yaml\)"):
            load_run_config(tmp_path)


def test_loading_twice_is_independent(tiny):
    first = tiny("model.seed=2")
    first.model.optim.betas.append(1.0)
    assert tiny().model.seed == 1234
    assert tiny().model.optim.betas == [0.9, 0.98]
