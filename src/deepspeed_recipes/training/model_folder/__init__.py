"""Prepares an exported folder for publication: model card, record of the training, licences, portable paths."""
