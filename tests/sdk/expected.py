"""What the samples print, and the ways in which ends.cpp ends, on any device."""

EXPECTED = {
    "minimal": "gradInput: -2 -94 -877.5 -1747.5\ngradWeight: 20 62\ngradBias: 6 8\n"
    "status 161001: aclnnLayerNormBackward: rstd is null, and must be given\n",
    "layer_norm_backward": "gradInput: -2 -94 -877.5 -1747.5\ngradWeight: 20 62\ngradBias: 6 8\n",
    "group_norm_backward": "gradInput: below 1e-5\ngradGamma: -75.8969 2.89683 155.849\ngradBeta: 68 100 132\n",
    "batch_norm_elemt_backward": "gradInput: 0 0.9 1.8 2.7 3.6 4.5 5.4 6.3\n",
    "sync_batch_norm": "mean: 0.901459 0.728063 0.555861\ninvstd: 0.934859 0.936714 0.949855\n"
    "runningMean: 0.0901459 0.0728063 0.0555861\nrunningVar: 1.02044 1.01997 1.01667\n"
    "outputs and gradients of both ranks: right\n",
}

WAYS_TO_END = ("returns", "finalises", "exits", "quits", "static", "stream", "event", "work", "plan")
