"""Token shards, samples and tokenizers."""
