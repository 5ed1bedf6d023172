"""What is sampled and learned from: forests on the host, rollouts on the device, packed rows, facts of turns."""
