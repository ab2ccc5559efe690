"""Publish an exported model on the Hugging Face Hub, after printing the list of files to upload.

    ds-recipes publish my-model OWNER/NAME --dry-run
    ds-recipes publish my-model OWNER/NAME --private
    ds-recipes publish runs/tiny-3m-full/20261121-101500/export OWNER/NAME

Weights, tokenizer, configuration, model card and training/ are uploaded in one commit. A folder with any other file, a
file with a credential or a path on this machine, weights that are not as they were written, and a repository that has
other files are refused. The command needs a token: `hf auth login`, or HF_TOKEN.
"""

from collections.abc import Sequence
from pathlib import Path

from ..recipe.run_folder import RunFolder, model_of
from .main import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the files, upload them, and return 0."""
    parser = Parser("publish", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a run's export/, or ds-recipes export output")
    parser.add_argument("name", metavar="OWNER/NAME", help="the model's name on the Hub; created if it is new")
    parser.add_argument("--private", action="store_true", help="only you, or your organisation, can access it")
    parser.add_argument("--dry-run", action="store_true", help="print the files, and upload nothing")
    options = parser.parse_args(arguments)
    from ..export import push
    from ..training.model_folder import complete

    run = RunFolder(options.folder)
    folder = run.export if run.recipe.exists() else options.folder
    if folder.exists() and folder == run.export:
        model_of(run)  # prints a warning if it is older than the run
    push.check_name(options.name)
    files = push.files(folder)
    print(push.show(folder, options.name, files, options.private), flush=True)
    if not any(file.name == push.CARD for file in files):
        print("the folder has no model card; ds-recipes export writes one, README.md, for a run's model")
    if options.dry_run:
        print("nothing was uploaded (--dry-run)")
        return 0
    complete.check_unaltered(folder)  # not in a dry run, which needs no torch
    target = push.look(options.name, files, options.private)
    print(push.push(target, files, options.private))
    return 0
