"""What makes an exported folder one to hand out: model card, record of the training, how it is published."""
