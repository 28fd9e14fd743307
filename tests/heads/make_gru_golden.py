"""Makes golden_gru.safetensors with torch: ``python tests/heads/make_gru_golden.py``."""

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

SIZE, HIDDEN, ROWS, STEPS = 6, 9, 3, 5


@torch.no_grad()
def make() -> dict[str, np.ndarray]:
    """Weights, inputs [n, M, H], and the states [n, M, G] of torch.nn.GRUCell, which torch.nn.GRU has too."""
    generator = torch.Generator().manual_seed(0)
    cell = torch.nn.GRUCell(HIDDEN, SIZE, bias=False)
    for weight in cell.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    inputs = torch.randn(STEPS, ROWS, HIDDEN, generator=generator)
    state, states = torch.zeros(ROWS, SIZE), []
    for one in inputs:
        state = cell(one, state)
        states.append(state)
    whole = torch.nn.GRU(HIDDEN, SIZE, bias=False)
    whole.weight_ih_l0.copy_(cell.weight_ih)
    whole.weight_hh_l0.copy_(cell.weight_hh)
    torch.testing.assert_close(whole(inputs)[0], torch.stack(states))
    arrays = {"inputs": inputs, "states": torch.stack(states)}
    arrays |= {"weight_ih": cell.weight_ih, "weight_hh": cell.weight_hh}
    return {name: x.numpy() for name, x in arrays.items()}


if __name__ == "__main__":
    save_file(make(), Path(__file__).parent / "golden_gru.safetensors")
