"""Parts of networks, each an ``nn.Module``: attention, feed-forward, norms, rotary embedding, the cache."""
