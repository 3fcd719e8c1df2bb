# Shared by ./quickstart and ./test; sourced, not run. Needs `root` (the checkout) and `install` (1 or 0).

# install_packages run|all: installs what tools/packages.txt lists and dpkg lacks, and says what that is.
install_packages() {
  local wanted missing=() package
  if [[ $1 == all ]]; then
    wanted=$(sed 's/#.*//' "$root/tools/packages.txt" | awk 'NF {print $1}')
  else
    wanted=$(sed 's/#.*//' "$root/tools/packages.txt" | awk '$2 == "run" {print $1}')
  fi
  if ! command -v dpkg-query > /dev/null; then
    echo "packages: this is not Debian; needed are the equivalents of:" $wanted
    return
  fi
  for package in $wanted; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null) == installed ]] || missing+=("$package")
  done
  if ((${#missing[@]} == 0)); then
    echo "packages: all $(wc -w <<< "$wanted") are installed"
    return
  fi
  if ((install == 0)); then
    echo "error: missing Debian packages: ${missing[*]}" >&2
    echo "hint: install them, or run without --no-install" >&2
    exit 1
  fi
  local sudo=()
  if (($(id -u) != 0)); then
    if ! command -v sudo > /dev/null; then
      echo "error: missing Debian packages, and neither root nor sudo to install them: ${missing[*]}" >&2
      echo "hint: install them as root, then run this again" >&2
      exit 1
    fi
    sudo=(sudo)
  fi
  echo "packages: installing with apt-get: ${missing[*]}"
  "${sudo[@]}" apt-get update -qq < /dev/null
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${missing[@]}" < /dev/null > /dev/null
}

# make_venv: a virtual environment in .venv. With requirements files as arguments, their packages too.
make_venv() {
  if [[ ! -x $root/.venv/bin/python ]]; then
    if ((install == 0)); then
      echo "python: no .venv and --no-install: tests use $(command -v python3) as it is"
      return
    fi
    echo "python: creating .venv"
    python3 -m venv "$root/.venv"
  fi
  local requirements stamp
  for requirements in "$@"; do
    stamp=$root/.venv/$(basename "$requirements").installed
    if cmp -s "$requirements" "$stamp"; then
      echo "python: .venv has the packages of ${requirements#"$root/"}"
    elif ((install == 0)); then
      echo "python: .venv lacks packages of ${requirements#"$root/"}, and --no-install"
    else
      echo "python: installing into .venv the packages of ${requirements#"$root/"}:" \
        $(sed 's/#.*//' "$requirements" | head -c 400)
      "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-cache-dir \
        -r "$requirements" < /dev/null
      cp "$requirements" "$stamp"
    fi
  done
}

venv_python() {
  if [[ -x $root/.venv/bin/python ]]; then echo "$root/.venv/bin/python"; else command -v python3; fi
}

# One compiler per core, and 1.5 GB of memory for each.
build_jobs() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/^MemAvailable:/ {print int($2 / 1572864)}' /proc/meminfo)
  ((memory < 1)) && memory=1
  echo $((cores < memory ? cores : memory))
}

# configure PRESET [-D...]: with the program, whatever the folder was configured for before; with ccache when it is there.
configure() {
  local launcher=()
  command -v ccache > /dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  [[ $1 == cuda ]] && ((${#launcher[@]})) && launcher+=(-DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  (cd "$root" && cmake --preset "$1" -DBASIN_BUILD_PROGRAM=ON "${launcher[@]}" "${@:2}" \
    > "$root/build/configure-$1.log" 2>&1) || {
    cat "$root/build/configure-$1.log" >&2
    return 1
  }
}
