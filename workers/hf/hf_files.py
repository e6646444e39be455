"""Names of the files beside a model's tensors."""

MODEL_FILE = "model.yaml"  # the model section that an import writes
# Copied as they are, both ways.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja"),
)
