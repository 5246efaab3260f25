"""List, fetch and check the datasets that the experiments use.

  eigenstep data                    where each dataset is looked for, and whether it is there
  eigenstep data fetch cifar-10     download it with the package manager that publishes it
  eigenstep data fetch all          download everything that is not there yet
  eigenstep data check all          load each one, to be sure that it is whole
  eigenstep data check FOLDER       the same for a folder of pictures, before a long run
  eigenstep data sample FOLDER NEW  draw classes of a folder of pictures, as for ImageNet-25

Set the environment variable EIGENSTEP_DATA to keep datasets elsewhere than in ~/.cache/eigenstep.
Commands that train also take a folder of pictures (train/<class>/*, val/<class>/*) or a text file
in place of a name. ImageWoof-10, which the paper uses, is such a folder: unpack imagewoof2.tgz from
https://github.com/fastai/imagenette.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from ..console import LARGEST_SEED, UserError, between, print_table, track
from .datasets import DATASETS, fetch, find, load_images, load_text, places
from .files import list_picture_parts, read_picture
from .samples import Images, Text
from .sampling import sample_classes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to do and with which datasets."""
    parser.add_argument(
        "action", nargs="?", choices=["list", "fetch", "check", "sample"], default="list"
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(DATASETS)}, all, or folders"
    )
    parser.add_argument(
        "--classes",
        type=between(1, 10**6),
        default=25,
        help="sample: how many (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=between(0, LARGEST_SEED),
        default=0,
        help="sample: decides which (default: %(default)s)",
    )
    parser.add_argument(
        "--list",
        type=Path,
        help="sample: take those that a file names, such as classes.txt of another",
    )


def run(args: argparse.Namespace) -> None:
    """List, fetch, check or sample."""
    if args.action == "sample":
        sample(args)
    elif args.action == "list":
        print_table("Datasets", ("name", "what it is", "where"), status())
    else:
        act = check if args.action == "check" else get
        for name in _chosen(args.action, args.names):
            act(name, again="all" not in args.names)


def sample(args: argparse.Namespace) -> None:
    """Draw some classes of a folder of pictures."""
    if len(args.names) != 2:
        raise UserError("say which folder to sample and where to: eigenstep data sample FOLDER NEW")
    source, target = map(Path, args.names)
    drawn = sample_classes(source, target, classes=args.classes, seed=args.seed, listed=args.list)
    print(f"{target} has {len(drawn)} classes of {source}, named in classes.txt")


def _chosen(action: str, names: list[str]) -> list[str]:
    """Return the datasets that are named; folders can be checked as well."""
    known = (*DATASETS, "all")
    unknown = [n for n in names if n not in known and not (action == "check" and Path(n).is_dir())]
    if unknown:
        raise UserError(f"no dataset {', '.join(unknown)}: expected {', '.join(DATASETS)} or all")
    if not names:
        raise UserError(f"say which dataset to {action}: {', '.join(DATASETS)} or all")
    return list(DATASETS) if "all" in names else names


def check(name: str, *, again: bool) -> None:
    """Load a dataset whether or not it was loaded before, and say what is in it."""
    print(f"{name}: {describe(name)}")


def get(name: str, *, again: bool) -> None:
    """Fetch a dataset, if it is not there or is wanted again."""
    if not again and find(name) is not None:
        print(f"{name}: already there")
    elif not DATASETS[name].download:
        print(f"{name}: nothing to fetch, it comes with a Python package")
    else:
        print(f"{name}: running `{shlex.join(DATASETS[name].download)}` ...", flush=True)
        print(f"{name}: now in {fetch(name)}")


def status() -> list[tuple[str, str, str]]:
    """Say of each dataset what it is, and where it is or how to get it."""
    rows = []
    for name, dataset in DATASETS.items():
        folder = find(name)
        if not dataset.files:
            where = "comes with scikit-learn"
        elif folder is not None:
            where = str(folder)
        else:
            where = (
                f"not in {' or '.join(map(str, places(name)))}; get it: eigenstep data fetch {name}"
            )
        rows.append((name, dataset.summary, where))
    return rows


def describe(name: str) -> str:
    """Load a dataset, or read every picture in a folder, and say what is in it."""
    if name not in DATASETS:
        parts, classes = list_picture_parts(Path(name))
        for part, (paths, _) in parts.items():
            for path in track(paths, f"Reading {Path(name, part)}"):
                read_picture(path)
        return (
            f"{len(parts['train'][0]):,} + {len(parts['val'][0]):,} pictures in "
            f"{len(classes)} classes"
        )
    loaded: Images | Text = load_images(name) if DATASETS[name].kind is Images else load_text(name)
    if isinstance(loaded, Text):
        return (
            f"{len(loaded.train):,} + {len(loaded.test):,} characters, {len(loaded.alphabet)} "
            "different ones"
        )
    sizes = " × ".join(map(str, loaded.shape))
    return f"{len(loaded.train_labels):,} + {len(loaded.test_labels):,} pictures of {sizes}"
