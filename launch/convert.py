"""Write a draft again as specjax writes it, from any layout that it reads; with --int8 a quarter as large.

    python -m launch.convert --method=eagle --draft=runs/eagle --out=drafts/eagle --int8

int8 is read by specjax alone; without it other servers read the result too.
"""

from pathlib import Path

from absl import flags

from launch import common
from specjax.loading.drafts import load_draft, save_draft
from specjax.loading.eagle import load_eagle, save_eagle

FORMATS = {"medusa": (load_draft, save_draft), "eagle": (load_eagle, save_eagle)}
METHOD = flags.DEFINE_enum("method", None, sorted(FORMATS), "What the draft is of.", required=True)
DRAFT = flags.DEFINE_string("draft", None, "Folder of the draft, or of the run that trained it.", required=True)
OUT = flags.DEFINE_string("out", None, "Folder to write.", required=True)
INT8 = flags.DEFINE_bool("int8", False, "Matrices in int8, with a scale for each row.")


def run() -> None:
    load, save = FORMATS[METHOD.value]
    save(OUT.value, load(DRAFT.value), int8=INT8.value)
    size = sum(path.stat().st_size for path in Path(OUT.value).expanduser().glob("*.safetensors"))
    print(f"written: {OUT.value} ({size / 1e6:,.1f} MB)")


if __name__ == "__main__":
    common.main(run)
