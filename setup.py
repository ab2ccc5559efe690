"""What pyproject.toml cannot say: recipes/ is installed as deepspeed_recipes, with configs/ inside it."""

from setuptools import find_namespace_packages, setup

NAME = "deepspeed_recipes"
FOLDERS = {"recipes": NAME, "configs": f"{NAME}.configs"}
"""Folders of the checkout, and the packages that they are installed as."""
CHECKOUT_ONLY = f"{NAME}.planning.calibration.measurements"
"""Of what is in it, the tables that others published: the planner is fitted on them and judged by them, and plans
without them."""


def packages(folder: str) -> list[str]:
    """Return the installed names of a folder and of every folder in it."""
    found = find_namespace_packages(include=[folder, f"{folder}.*"], exclude=["*.__pycache__"])
    names = (FOLDERS[folder] + name.removeprefix(folder) for name in found)
    return [name for name in names if not name.startswith(f"{CHECKOUT_ONLY}.")]


setup(
    package_dir={package: folder for folder, package in FOLDERS.items()},
    packages=[name for folder in FOLDERS for name in packages(folder)],
    # The pins lie above configs/ and are installed above it too: deepspeed_recipes/constraints.txt.
    package_data={"": ["*"], FOLDERS["configs"]: ["../constraints.txt", "../constraints-serving.txt"]},
    exclude_package_data={CHECKOUT_ONLY: ["published_*.json"]},
    include_package_data=False,
)
