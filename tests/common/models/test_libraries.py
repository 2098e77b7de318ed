"""Networks of transformers and timm: from local files alone, without pickle and without code."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client.host import Host
from perennial.common.config import RunConfig, load_config, parse_task
from perennial.common.data.scenarios.arrays import Arrays
from perennial.common.models.network import network
from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import PAD, SampleShape, made_up

pytestmark = pytest.mark.slow  # transformers takes seconds to import


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT, without a head."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert") / "tiny"
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        transformers.BertModel(config).save_pretrained(folder)
    return folder


TOKENS = {
    "name": "arrays",
    "sites": ["a"],
    "inputs": [6],
    "vocabulary": 50,
    "labels": ["no", "yes", "perhaps"],
    "parts": ["0" * 16],
}


def of(folder: Path | str, *settings: str, scenario: Any = TOKENS) -> RunConfig:
    options = {"method": "fedavg", "scenario": Arrays.model_validate(scenario)}
    return load_config(options=options, settings=[f"model.name=transformers:{folder}", *settings])


def net(config: RunConfig) -> Any:
    return network(config.model, config.scenario.input_shape, config.scenario.task.outputs)


def test_a_folder_is_a_classifier_that_starts_from_its_weights(bert: Path) -> None:
    import transformers

    config = of(bert)
    own, x = net(config), made_up(config.scenario.input_shape, 4)
    tensors = own.initial(3)
    assert not torch.equal(tensors["classifier.weight"], own.initial(4)["classifier.weight"])
    body = transformers.BertModel.from_pretrained(bert, attn_implementation="eager").eval()
    torch.testing.assert_close(own.features(tensors, x), body(x).pooler_output)
    logits = own.predict(tensors, x)
    assert logits.shape == (4, 3)
    torch.testing.assert_close(own.classify(tensors, own.features(tensors, x)), logits)
    assert own.draws
    again = load_config(options=config.model_dump(mode="json"))
    assert again == config


def test_a_head_of_the_folder_is_taken_and_its_gradient_has_a_gradient(bert: Path, tmp_path: Path) -> None:
    import transformers

    config = transformers.AutoConfig.from_pretrained(bert, num_labels=3)
    whole = transformers.BertForSequenceClassification(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    own = net(of(tmp_path / "whole"))
    tensors, x = own.initial(0), made_up(own.input_shape, 4)
    torch.testing.assert_close(own.predict(tensors, x), whole(x).logits)
    assert not torch.equal(own.initial(0, "another")["classifier.weight"], tensors["classifier.weight"])
    leaves = {name: tensors[name].requires_grad_() for name in own.parameter_names}
    names = [name for name in leaves if "query" in name]
    loss = own.predict(leaves, x).square().sum()
    gradients = torch.autograd.grad(loss, [leaves[name] for name in names], create_graph=True)
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    assert torch.autograd.grad(norm, leaves[names[0]])[0].abs().sum() > 0


def test_lora_and_a_folder_without_weights(bert: Path, tmp_path: Path) -> None:
    own = net(of(bert, "model.lora={rank = 2, layers = 'query|value'}", "model.hidden_dropout_prob=0.0"))
    assert len(own.adapter_names) == 8
    body = next(tensor for name, tensor in own.frozen.items() if name.endswith("word_embeddings.weight"))
    assert body.shape == (50, 8)
    assert sum("lora" not in name for name in own.initial(0)) == 2
    (tmp_path / "drawn").mkdir()
    shutil.copy(bert / "config.json", tmp_path / "drawn")
    drawn = net(of(tmp_path / "drawn"))
    names = [name for name in drawn.parameter_names if "query.weight" in name]
    assert not torch.equal(drawn.initial(0)[names[0]], drawn.initial(1)[names[0]])


def test_pictures(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_channels=1,
    )
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    scenario = {key: value for key, value in TOKENS.items() if key != "vocabulary"} | {"inputs": [1, 8, 8]}
    own = net(of(tmp_path / "vit", scenario=scenario))
    assert own.predict(own.initial(0), made_up(own.input_shape, 2)).shape == (2, 3)
    with pytest.raises(UserError, match=r"takes ids of tokens, or pictures, and samples are of shape 6"):
        net(of(tmp_path / "vit", scenario={**scenario, "inputs": [6]}))


def test_a_model_that_looks_at_the_last_token_needs_to_know_what_is_behind_it(tmp_path: Path) -> None:
    """GPT-2's own gives logits of every token and takes the last one's, which here are those of its features."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32, "eos_token_id": 3}
    config = transformers.GPT2Config(**sizes, bos_token_id=3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        transformers.GPT2Model(config).save_pretrained(tmp_path / "gpt")
    words = r"model.pad_token_id: .* looks at the last token of a text, .* such as model.pad_token_id=0"
    with pytest.raises(UserError, match=words):
        net(of(tmp_path / "gpt"))
    scenario = {**TOKENS, "padded": True}
    own = net(of(tmp_path / "gpt", "model.pad_token_id=4", scenario=scenario))
    body = transformers.GPT2Model.from_pretrained(tmp_path / "gpt", attn_implementation="eager").eval()
    x = 5 + made_up(SampleShape((6,), 40), 4)
    x[1, 4:] = PAD
    tensors = own.initial(0)
    z = own.features(tensors, x)
    torch.testing.assert_close(z[0], body(x[:1]).last_hidden_state[0, -1])
    torch.testing.assert_close(z[1], body(x[1:2, :4]).last_hidden_state[0, -1])
    torch.testing.assert_close(own.classify(tensors, z), own.predict(tensors, x))
    assert own.classifier_names == ("classifier.weight",)


def test_what_is_no_model_is_one_sentence(bert: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(bert / "config.json", pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    words = (
        r"pickled has its weights in pytorch_model.bin, which may run code as it is read, and not in safetensors"
    )
    with pytest.raises(UserError, match=words):
        of(pickled)
    with pytest.raises(UserError, match=r"no folder 'nobody/nothing' here, and Hugging Face's cache .* has no"):
        of("nobody/nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty has no config.json"):
        of(tmp_path / "empty")
    code = tmp_path / "code"
    code.mkdir()
    auto = {"AutoConfig": "configuration.Own", "AutoModelForSequenceClassification": "modeling.Own"}
    (code / "config.json").write_text(json.dumps({"model_type": "own-kind", "auto_map": auto}))
    (code / "configuration.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match=r"is no model of transformers"):
        net(of(code))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UserError, match=r"model.hiden_dropout_prob: .* has no such setting; did you mean"):
        net(of(bert, "model.hiden_dropout_prob=0.0"))
    with pytest.raises(UserError, match=r"model.weights: a model of transformers has its weights in its folder"):
        of(bert, "model.weights=x.pt")


def test_a_site_with_another_folder_is_refused_in_one_sentence(bert: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(bert, own)
    config = of(own)
    (own / "config.json").write_text((own / "config.json").read_text().replace("0.1", "0.2"))
    other = rf"'{own}' has other files than those of the run \(SHA-256 [0-9a-f]{{12}}"
    with pytest.raises(UserError, match=other) as changed:
        Host({}).site(config.task(), parse_task(config.task()), 0)
    shutil.rmtree(own)
    with pytest.raises(UserError, match="there is no folder") as gone:
        Host({}).site(config.task(), parse_task(config.task()), 0)
    assert changed.value.told == gone.value.told, "a server could find out what folders a site has"


def test_networks_of_timm() -> None:
    pytest.importorskip("timm")
    scenario = {key: value for key, value in TOKENS.items() if key != "vocabulary"} | {"inputs": [1, 32, 32]}
    options = {"method": "fedavg", "scenario": Arrays.model_validate(scenario)}
    config = load_config(options=options, settings=["model.name=timm:test_vit", "model.img_size=32"])
    own = net(config)
    assert own.predict(own.initial(0), made_up(own.input_shape, 2)).shape == (2, 3)
    assert own.classifier_names == ("classifier.weight", "classifier.bias")
    with pytest.raises(UserError, match=r"unknown network of timm 'test_vitt'; did you mean 'test_vit"):
        net(load_config(options=options, settings=["model.name=timm:test_vitt"]))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the extra perennial\[transformers\], which is not installed"):
        of("anything")
