"""Each built-in family against diffusers' own pipeline, on folders of random weights.

One proof is one function; `families` has one case per model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import policy, scored
from families.case import FamilyCase, all_cases
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unirl.algorithms.making import make_algorithm
from unirl.config.catalog import MODELS
from unirl.config.components import import_component
from unirl.config.schema import AlgorithmConfig
from unirl.core.types import PromptBatch, PromptRecord, Rollout, RolloutRequest, SamplingParams
from unirl.models.base import DiffusionModel, Frozen
from unirl.models.filling import fill_from_files
from unirl.models.lora import adapter_parameters, attach_lora
from unirl.models.stored_encodings import EncodedBefore, EncodingStore, fill, missing
from unirl.rollout.sampling import sample_with_model

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
CASES = {case.name: case for case in all_cases()}


class Loaded:
    """A case with its folder, and its model and pipeline once they were asked for."""

    def __init__(self, case: FamilyCase, folder: Path) -> None:
        self.case = case
        self.folder = case.build(folder)
        self.model = case.load(self.folder)
        self.pipeline = case.pipeline(self.folder)

    def sampling(self, guidance_scale: float | None = None) -> SamplingParams:
        """Of the case, with its first guidance scale unless said otherwise."""
        scale = self.case.guidance_scales[0] if guidance_scale is None else guidance_scale
        return replace(self.case.sampling, guidance_scale=scale)


@pytest.fixture(scope="module", params=CASES)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    case = CASES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in case.patched.items():
            patch.setattr(name, value)
        yield Loaded(case, tmp_path_factory.mktemp("families") / case.name)


def each_guidance(function: Callable[..., None]) -> Callable[..., None]:
    """Runs a proof with the case's first and last guidance scale."""
    return pytest.mark.parametrize("which_guidance", [0, -1], ids=["first", "last"])(function)


def request_of(
    loaded: Loaded, sampling: SamplingParams, sde_steps: tuple[int, ...] = (), group: int = 1
) -> RolloutRequest:
    keys = tuple(f"proof/{number}" for number in range(len(loaded.case.prompts) * group))
    return RolloutRequest(
        prompts=PromptBatch(tuple(loaded.case.prompts)),
        samples_per_prompt=group,
        sampling=sampling,
        sigmas=loaded.model.sigmas(sampling),
        sde_steps=(sde_steps,) * len(keys),
        initial_noise_keys=keys,
        step_noise_keys=keys,
        weight_version=None,
    )


def sampled(
    loaded: Loaded, sampling: SamplingParams, *, model: DiffusionModel | None = None, **keys: Any
) -> Rollout:
    return sample_with_model(model or loaded.model, request_of(loaded, sampling, **keys), 0, CPU)


def noise_of(loaded: Loaded, sampling: SamplingParams) -> Tensor:
    """The start of `sampled`."""
    from unirl.samplers.noise import keyed_noise
    from unirl.samplers.parametrisation import start_scale

    request = request_of(loaded, sampling)
    shape = loaded.model.latent_shape(sampling)
    return keyed_noise(request.initial_noise_keys, shape) * start_scale(request.sigmas[0])


def theirs(loaded: Loaded, sampling: SamplingParams, output_type: str) -> Any:
    case = loaded.case
    noise = noise_of(loaded, sampling)
    return case.call(loaded.pipeline, case.prompts, sampling, noise, output_type)


def with_adapter(loaded: Loaded, dtype: torch.dtype = torch.float32) -> DiffusionModel:
    """A model of its own with the family's adapter, B not zero."""
    model = loaded.case.load(loaded.folder, dtype)
    targets = MODELS[loaded.case.family].lora_targets
    attach_lora(model.network, 4, 8.0, targets, seed=0)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapter_parameters(model.network).items():
        if ".lora_B." in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


# --- sampling -------------------------------------------------------------------------------------


@each_guidance
def test_ode_sampling_equals_the_pipelines_own_call(loaded: Loaded, which_guidance: int) -> None:
    sampling = loaded.sampling(loaded.case.guidance_scales[which_guidance])
    ours = sampled(loaded, sampling)
    expected = theirs(loaded, sampling, "latent")
    torch.testing.assert_close(
        ours.trajectory.final_latents, expected.float(), rtol=0, atol=loaded.case.tolerance
    )
    request = request_of(loaded, sampling)
    swapped = replace(request, prompts=PromptBatch(request.prompts.records[::-1]))
    other = sample_with_model(loaded.model, swapped, 0, CPU).trajectory.final_latents
    assert (other - expected).abs().max() > 1e-2, "the tiny network must listen to its prompt"


def test_pictures_equal_the_pipelines_own(loaded: Loaded) -> None:
    sampling = loaded.sampling(loaded.case.guidance_scales[-1])
    ours = sampled(loaded, sampling).images
    expected = theirs(loaded, sampling, "np" if ours.ndim == 5 else "pil")
    assert ours.dtype == torch.uint8
    assert ours.shape == expected.shape
    difference = (ours.int() - expected.int()).abs()
    # A value on the edge between two grey levels may fall to either side.
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 1e-2
    assert expected.float().std() > 3, "a flat picture would prove nothing"


def test_levels_fall_from_one_to_zero(loaded: Loaded) -> None:
    for num_steps in (2, 10):
        sampling = replace(loaded.sampling(), num_inference_steps=num_steps)
        sigmas = loaded.model.sigmas(sampling)
        assert len(sigmas) == num_steps + 1
        assert loaded.case.lowest_start < sigmas[0] <= 1
        assert sigmas[-1] == 0
        assert all(a > b for a, b in pairwise(sigmas))


@each_guidance
def test_a_sample_does_not_depend_on_its_batch(loaded: Loaded, which_guidance: int) -> None:
    sampling = loaded.sampling(loaded.case.guidance_scales[which_guidance])
    request = request_of(loaded, sampling)
    together = sample_with_model(loaded.model, request, 0, CPU)
    for number in range(len(request)):
        alone = replace(
            request,
            prompts=PromptBatch(request.prompts.records[number : number + 1]),
            sde_steps=request.sde_steps[:1],
            initial_noise_keys=request.initial_noise_keys[number : number + 1],
            step_noise_keys=request.step_noise_keys[number : number + 1],
        )
        apart = sample_with_model(loaded.model, alone, 0, CPU)
        torch.testing.assert_close(
            together.trajectory.final_latents[number],
            apart.trajectory.final_latents[0],
            rtol=0,
            atol=max(loaded.case.tolerance, 1e-4),
        )


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@each_guidance
def test_replaying_own_samples_gives_ratio_one(
    loaded: Loaded, which_guidance: int, dtype: torch.dtype
) -> None:
    model = with_adapter(loaded, dtype)
    scale = loaded.case.guidance_scales[which_guidance]
    sampling = replace(loaded.sampling(scale), eta=0.7)
    rollout = sampled(loaded, sampling, model=model, sde_steps=(1, 2), group=2)
    algorithm = make_algorithm(AlgorithmConfig(old_log_prob="rollout"))
    rows = algorithm.rows([scored(rollout)])
    whole = torch.arange(len(rows))
    anchored, _ = algorithm.anchor(policy(model), rows, [whole])
    for step_rows in whole.split(len(rollout.request)):  # the batches that sampling had
        losses = algorithm.loss(policy(model), anchored.select(step_rows))
        assert not losses.details["log_ratio"].any()


def test_the_gradient_reaches_every_adapter_target_and_only_those(loaded: Loaded) -> None:
    model = with_adapter(loaded)
    velocity_of_a_prompt(loaded, model).square().mean().backward()
    entry = MODELS[loaded.case.family]
    declared = {
        name.replace(".base_layer", "")
        for name, module in model.network.named_modules()
        if isinstance(module, nn.Linear)
        and any(name.replace(".base_layer", "").endswith(f".{t}") for t in entry.lora_targets)
    }
    adapter = adapter_parameters(model.network)
    bound = {name.partition(".lora_")[0] for name in adapter}
    assert bound == declared
    for name, parameter in model.network.named_parameters():
        if name in adapter:
            idle = name.partition(".lora_")[0].endswith(tuple(loaded.case.idle_targets) or "\0")
            reached = parameter.grad is not None and bool(parameter.grad.any())
            assert reached != idle, name
        else:
            assert parameter.grad is None, name


def test_every_weight_of_the_network_can_be_trained(loaded: Loaded) -> None:
    model = loaded.case.load(loaded.folder)
    model.network.requires_grad_(True)
    velocity_of_a_prompt(loaded, model).square().mean().backward()
    idle = {n for n, p in model.network.named_parameters() if p.grad is None}
    assert not {name for name in idle if not name.endswith(tuple(loaded.case.untrained) or "\0")}


def test_bf16_stays_near_fp32_and_returns_float32(loaded: Loaded) -> None:
    low = loaded.case.load(loaded.folder, torch.bfloat16)
    exact = velocity_of_a_prompt(loaded, loaded.model)
    rounded = velocity_of_a_prompt(loaded, low)
    assert rounded.dtype == torch.float32
    error = (rounded - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < error < 0.1
    sampling = loaded.sampling()
    assert sampled(loaded, sampling, model=low).images.dtype == torch.uint8


def velocity_of_a_prompt(loaded: Loaded, model: DiffusionModel) -> Tensor:
    """At two noise levels, one of them low."""
    sampling = loaded.sampling(loaded.case.guidance_scales[-1])
    latents = noise_of(loaded, sampling)
    conditioning = model.encode(loaded.case.prompts, sampling)
    sigma = torch.tensor([0.95, 0.3])[: len(latents)]
    return model.velocity(latents, sigma, conditioning)


# --- rewards with a gradient ----------------------------------------------------------------------


def test_pixels_are_the_decoded_pictures_before_rounding(loaded: Loaded) -> None:
    sampling = loaded.sampling()
    choices = ("all", "first", 7) if sampling.num_frames > 1 else ("all",)
    latents = sampled(loaded, sampling).trajectory.final_latents
    for wanted in choices:
        chosen = replace(sampling, decoded_frames=wanted)
        pixels = loaded.model.pixels(latents, chosen)
        decoded = loaded.model.decode(latents, chosen)
        assert pixels.dtype == torch.float32
        assert pixels.shape == decoded.shape
        # Half a grey level of rounding, and what a batch of another size may change.
        assert (255 * pixels - decoded).abs().max() <= 0.51


def test_the_gradient_of_the_reward_is_its_slope_along_the_adapter(loaded: Loaded) -> None:
    """Through decoder, guidance and all steps, as DRaFT takes it."""
    model, steps = with_adapter(loaded), loaded.case.sampling.num_inference_steps
    sampling = replace(
        loaded.sampling(loaded.case.guidance_scales[-1]), decoded_frames="first", solver="euler"
    )
    algorithm = make_algorithm(AlgorithmConfig(path="draft", last_steps=steps), contrast)
    request = replace(request_of(loaded, sampling), kept_steps=tuple(range(steps)))
    rows = algorithm.rows([scored(sample_with_model(model, request, 0, CPU))])
    rows, _ = algorithm.anchor(policy(model), rows, [torch.arange(len(rows))])
    adapter = adapter_parameters(model.network)

    def loss() -> Tensor:
        return algorithm.loss(policy(model), rows).loss.mean()

    gradients = torch.autograd.grad(
        loss(), list(adapter.values()), allow_unused=True, materialize_grads=True
    )
    for name, gradient in zip(adapter, gradients, strict=True):
        idle = name.partition(".lora_")[0].endswith(tuple(loaded.case.idle_targets) or "\0")
        assert bool(gradient.any()) != idle, name
    length = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    moved = []
    for distance in (STEP, -STEP):
        changed = zip(adapter.values(), gradients, strict=True)
        with torch.no_grad():
            before = [(p, p.clone(), p.add_(distance / length * g)) for p, g in changed]
            moved.append(loss())
            for parameter, value, _ in before:
                parameter.copy_(value)
    slope = (moved[0] - moved[1]) / (2 * STEP)
    torch.testing.assert_close(slope, length, rtol=0.05, atol=0)


STEP = 1e-3
"""Along the gradient: small beside the adapter, large beside float32's rounding."""


def contrast(images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
    """[B] a fixed sum of the pixels, unlike for neighbours."""
    pixels = images.flatten(1)
    signs = torch.randn(pixels.shape[1], generator=torch.Generator().manual_seed(4))
    return pixels @ signs


# --- adapters out and in --------------------------------------------------------------------------


def test_an_exported_adapter_gives_the_same_picture_in_a_fresh_pipeline(
    loaded: Loaded, tmp_path: Path
) -> None:
    model = with_adapter(loaded)
    sampling = loaded.sampling(loaded.case.guidance_scales[-1])
    ours = sampled(loaded, sampling, model=model).trajectory.final_latents
    model.write_adapter(tmp_path)
    case = loaded.case
    fresh = case.pipeline(loaded.folder)
    before = case.call(fresh, case.prompts, sampling, noise_of(loaded, sampling), "latent")
    case.load_adapter(fresh, tmp_path)
    after = case.call(fresh, case.prompts, sampling, noise_of(loaded, sampling), "latent")
    torch.testing.assert_close(ours, after.float(), rtol=0, atol=10 * case.tolerance)
    assert (before - after).abs().max() > 1e-2, "the adapter must change the picture"


def test_an_exported_model_is_read_back_and_samples_the_same(
    loaded: Loaded, tmp_path: Path
) -> None:
    model, sampling = with_adapter(loaded), loaded.sampling()
    ours = sampled(loaded, sampling, model=model).trajectory.final_latents
    model.write_model(tmp_path / "merged")
    again = loaded.case.load(tmp_path / "merged")
    theirs = sampled(loaded, sampling, model=again).trajectory.final_latents
    torch.testing.assert_close(ours, theirs, rtol=0, atol=10 * loaded.case.tolerance)


# --- memory ---------------------------------------------------------------------------------------


def test_every_tensor_owns_memory_that_can_be_released(loaded: Loaded) -> None:
    """Parking resizes storages to 0; a view of a mapped file, or of another tensor, cannot be."""
    modules = [loaded.model.network, *loaded.model.frozen_modules.values()]
    owners: dict[int, Tensor] = {}
    for tensor in chain.from_iterable(chain(m.parameters(), m.buffers()) for m in modules):
        storage = tensor.untyped_storage()
        if not tensor.numel():
            continue
        assert storage.resizable()
        assert storage.nbytes() == tensor.numel() * tensor.element_size()
        assert owners.setdefault(storage.data_ptr(), tensor) is tensor, "two share a storage"


def test_everything_is_frozen_and_in_eval_mode(loaded: Loaded) -> None:
    for module in [loaded.model.network, *loaded.model.frozen_modules.values()]:
        assert not any(part.training for part in module.modules())
        assert not any(parameter.requires_grad for parameter in module.parameters())


def test_pictures_are_decoded_whole(loaded: Loaded) -> None:
    """Tiles leave seams, which rewards that judge artefacts would see."""
    tiled = [name for name, m in loaded.model.frozen_modules.items() if vars(m).get("use_tiling")]
    assert tuple(tiled) == loaded.case.tiled


def test_without_encoders_only_the_network_is_loaded(loaded: Loaded) -> None:
    bare = loaded.case.load(loaded.folder, encoders=False)
    sampling = loaded.sampling()
    assert dict(bare.frozen_modules) == {}
    assert bare.latent_shape(sampling) == loaded.model.latent_shape(sampling)
    generator = torch.Generator().manual_seed(0)
    conditioning = bare.example_conditioning(2, sampling, generator)
    latents, sigma = noise_of(loaded, sampling)[:2], torch.tensor([0.9, 0.5])
    ours = bare.velocity(latents, sigma, conditioning)
    torch.testing.assert_close(ours, loaded.model.velocity(latents, sigma, conditioning))
    encoded = loaded.model.encode(loaded.case.prompts, sampling)
    for name, value in vars(conditioning).items():
        assert value.ndim == getattr(encoded, name).ndim, name


def test_encodings_are_kept_on_disk_and_stand_in_for_the_encoders(
    loaded: Loaded, tmp_path: Path
) -> None:
    case, sampling = loaded.case, loaded.sampling(loaded.case.guidance_scales[-1])
    store = EncodingStore(tmp_path, loaded.folder, case.family, case.settings())
    lacking = missing(store, case.prompts, [sampling])
    assert lacking
    fill(store, loaded.model, lacking)
    assert not missing(store, case.prompts, [sampling])
    settings = replace(case.settings(), frozen=Frozen.DECODER)
    bare = case.model_class.load(loaded.folder, settings)
    assert len(bare.frozen_modules) < len(loaded.model.frozen_modules)
    ours = sampled(loaded, sampling, model=EncodedBefore(bare, store))
    usual = sampled(loaded, sampling)
    torch.testing.assert_close(
        ours.trajectory.final_latents,
        usual.trajectory.final_latents,
        rtol=0,
        atol=max(case.tolerance, 1e-4),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_blueprint_is_laid_out_as_the_loaded_model(loaded: Loaded, dtype: torch.dtype) -> None:
    whole = loaded.case.load(loaded.folder, dtype)
    drawn = loaded.case.model_class.blueprint(loaded.folder, loaded.case.settings(dtype))
    assert layouts(drawn) == layouts(whole)
    assert all(p.is_meta for p in drawn.network.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_skeleton_filled_from_its_files_is_the_loaded_network(
    loaded: Loaded, dtype: torch.dtype
) -> None:
    whole = loaded.case.load(loaded.folder, dtype, encoders=False).network
    settings = loaded.case.settings(dtype, encoders=False)
    skeleton = loaded.case.model_class.load_skeleton(loaded.folder, settings)
    network = skeleton.network
    assert all(p.is_meta for p in network.parameters())
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.to_empty(device="cpu")
    for name, buffer in network.named_buffers():
        buffer.copy_(buffers[name])
    with torch.no_grad():
        fill_from_files(
            dict(network.named_parameters()), skeleton.network_files(), lambda p, v: p.copy_(v)
        )
    expected = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    found = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def layouts(model: DiffusionModel) -> dict[str, Any]:
    modules = {"network": model.network, **model.frozen_modules}
    return {
        name: {n: (t.shape, t.dtype) for n, t in chain(m.named_parameters(), m.named_buffers())}
        for name, m in modules.items()
    }


# --- nothing is called supported without a proof --------------------------------------------------


def test_every_family_has_cases_and_a_row_in_the_documentation() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| [`") or "| `tiny`" in line]
    shown = {row.split("`")[1] for row in rows}
    assert shown == MODELS.keys()
    assert {case.family for case in CASES.values()} == MODELS.keys() - {"tiny", "generic"}


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("tiny", "generic")])
def test_the_models_of_a_family_are_known_by_their_index(name: str) -> None:
    """A plan finds the family of a release by it."""
    parts = import_component(MODELS[name].path).parts
    assert parts.family == name
    assert set(MODELS[name].pipelines) == set(parts.pipelines)


def test_variants_of_the_weights_in_the_folder_are_not_read(tmp_path: Path) -> None:
    """Published folders hold half-precision copies beside the weights."""
    case = CASES["sd3"]
    folder = case.build(tmp_path / "sd3")
    whole = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    halved = {name: 1.5 * tensor for name, tensor in load_file(whole).items()}
    save_file(halved, whole.with_name("diffusion_pytorch_model.fp16.safetensors"))
    skeleton = case.model_class.load_skeleton(folder, case.settings(encoders=False))
    assert skeleton.network_files() == {"": [whole]}
