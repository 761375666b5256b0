"""On a CUDA device the text is the same as on the CPU, and so are the random numbers."""

import pytest
import torch
from support import toys
from support.toys import greedy, prompt, text_of

from flashmap.modeling.fused_flashmap import Stream, seeded_normal, seeded_uniform

pytestmark = pytest.mark.gpu

FAMILIES = {"llama": toys.llama, "gemma3": toys.gemma3, "gpt2": toys.gpt2}
TOKENS = 40


def test_uniform_numbers_are_bit_equal_and_normals_agree_to_5e_6() -> None:
    seeds, positions = torch.tensor([7, -(2**60)]), torch.arange(18).view(2, 9)
    for stream in (Stream.NOISE, Stream.GUMBEL):
        on_cpu = seeded_uniform(seeds, positions, 4097, stream)
        on_gpu = seeded_uniform(seeds.cuda(), positions.cuda(), 4097, stream)
        assert torch.equal(on_cpu, on_gpu.cpu())
    normals = seeded_normal(seeds.cuda(), positions.cuda(), 4097).cpu()
    assert (normals - seeded_normal(seeds, positions, 4097)).abs().max() <= 5e-6


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_draft_agrees_with_the_cpu(num_steps: int) -> None:
    target, drafter = toys.llama(), toys.drafter()
    logits = {}
    for device in ("cpu", "cuda"):
        target, drafter = target.to(device), drafter.to(device)
        cache = drafter.new_cache(1, 32)
        features = torch.randn(1, 9, drafter.fc.in_features, generator=torch.Generator())
        drafter.extend_context(cache, features)
        with torch.no_grad():
            logits[device] = drafter.draft(
                torch.tensor([5], device=device),
                cache,
                target.get_input_embeddings(),
                target.get_output_embeddings(),
                num_steps,
                seed=3,
            ).cpu()
    assert (logits["cuda"] - logits["cpu"]).abs().max() <= 1e-4 * logits["cpu"].abs().max()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("drafter_device", ["cuda", "cpu"])
def test_greedy_text_is_the_targets_own(name: str, drafter_device: str) -> None:
    target = FAMILIES[name]().cuda()
    ids = prompt(11).cuda()
    out = toys.drafter().to(drafter_device).spec_generate(target, ids, max_new_tokens=TOKENS)
    assert out.sequences.device.type == "cuda"
    assert text_of(out, ids) == greedy(target, ids, TOKENS)


def test_a_seed_samples_the_same_text_as_on_the_cpu() -> None:
    ids, target, drafter = prompt(11), toys.llama(), toys.drafter()
    texts = []
    for device in ("cpu", "cuda"):
        target, drafter = target.to(device), drafter.to(device)
        out = drafter.spec_generate(
            target, ids.to(device), max_new_tokens=TOKENS, temperature=0.8, seed=11
        )
        texts.append(text_of(out, ids.to(device)))
    assert texts[0] == texts[1]
