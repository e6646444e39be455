"""What to run and when: mesh, instructions, programs, generators, passes, proofs, simulator, drawings. No torch, no
Ray."""
