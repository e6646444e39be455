"""What is trained and where: mesh, model, tensors, and the plan that workers get."""
