"""Chapter 43: folded features against the formula."""

import torch
from lab.chapters import tabular


def test_folded_is_the_formula_with_relu_after_each_layer():
    network, x = tabular.folded(12, (3, 4), (5, 6), 2), torch.randn(7, 12)
    out = x.reshape(7, 3, 4)
    for layer in (network[1], network[3]):
        (w1, w2), (b1, b2) = layer.weights, layer.biases
        out = torch.einsum("bij,hi,kj->bhk", out, w1, w2)
        out = out + torch.outer(b1, w2.sum(1)) + b2
        out = out.clamp_min(0)
    expected = out.flatten(1) @ network[-1].weight.T + network[-1].bias
    torch.testing.assert_close(network(x), expected, rtol=1e-4, atol=1e-5)
