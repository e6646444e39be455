"""What GPUs can do: by data sheets, or measured."""
