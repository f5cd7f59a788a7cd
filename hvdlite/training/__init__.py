"""What the optimizers of all frameworks share: pending gradients, steps, the comparison of replicas."""
