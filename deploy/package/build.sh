#!/usr/bin/env bash
# Creates a tar.gz, a .deb and an .rpm from the built program, and adds the SBOM, the Helm chart and SHA256SUMS.
#
#   deploy/package/build.sh PROGRAM SBOM CHART FOLDER [VERSION]    called by ./dev package
#
# The result is in FOLDER/out. VERSION, which tests of an upgrade set, overrides the packages' version. The .deb and the
# .rpm contain the same files, except that Debian keeps the completions for zsh in another folder. All timestamps are those
# of the last commit, so the same program results in the same packages.
set -euo pipefail
umask 022
program=$1 sbom=$2 chart=$3 folder=$4
out=$folder/out tree=$folder/tree

# The newest glibc version that the program may require: the version in RHEL 8 and Debian 10.
glibc=2.28
version=$("$program" --version)
version=${version#walpost }
version=${5:-${version%% *}}
machine=$(uname -m)
case $machine in
    x86_64) architecture=amd64 ;;
    aarch64) architecture=arm64 ;;
    *) echo "build.sh: no packages for $machine" >&2; exit 1 ;;
esac
export SOURCE_DATE_EPOCH
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)

die() { echo "build.sh: $*" >&2; exit 1; }

check_program() {
    local newest needed
    newest=$(readelf --dyn-syms --wide "$program" | grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' | sort --version-sort | tail -1)
    if [[ $(printf '%s\n' "$glibc" "$newest" | sort --version-sort | tail -1) != "$glibc" ]]; then
        die "$program needs glibc $newest, expected $glibc or earlier"
    fi
    needed=$(readelf --dynamic --wide "$program" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
    if grep -vE '^(libc|libm|libdl|libpthread|librt|libutil|ld-linux-.*)\.so\.[0-9]+$' <<<"$needed"; then
        die "$program needs the libraries above, expected only those of glibc"
    fi
    echo "walpost $version: highest symbol version GLIBC_$newest; needs $(tr '\n' ' ' <<<"$needed")"
}

# The files that both packages install.
make_tree() {
    local share=$tree/usr/share
    rm -rf "$tree"
    install -D --mode=755 "$program" "$tree/usr/bin/walpost"
    install --directory --mode=750 "$tree/etc/walpost"
    install --directory "$share/man/man1" "$share/walpost/sql" "$share/doc/walpost/docs" "$tree/usr/lib/systemd/system" \
        "$share/bash-completion/completions" "$share/fish/vendor_completions.d" "$share/zsh/site-functions"
    # Without the first line, which describes how to install the unit by hand.
    sed -e '/^# Install as .*systemctl daemon-reload/d' -e 's#^ExecStart=/usr/local/bin/#ExecStart=/usr/bin/#' \
        deploy/systemd/walpost.service >"$tree/usr/lib/systemd/system/walpost.service"
    install -D --mode=644 deploy/package/sysusers.conf "$tree/usr/lib/sysusers.d/walpost.conf"
    "$program" man "$share/man/man1"
    gzip --no-name --best "$share"/man/man1/*.1
    "$program" completions bash >"$share/bash-completion/completions/walpost"
    "$program" completions fish >"$share/fish/vendor_completions.d/walpost.fish"
    "$program" completions zsh >"$share/zsh/site-functions/_walpost"
    install --mode=644 sql/*.sql "$share/walpost/sql"
    install --mode=644 deploy/prometheus/alerts.yml deploy/grafana/dashboard.json "$share/walpost"
    install --mode=644 README.md CHANGELOG.md deploy/package/walpost.toml "$share/doc/walpost"
    install --mode=644 docs/*.md "$share/doc/walpost/docs"
    install --mode=644 LICENSE "$share/doc/walpost/copyright"
    python3 -B deploy/package/contents.py notices >"$share/doc/walpost/THIRD-PARTY.txt"
    find "$tree" -exec touch --date="@$SOURCE_DATE_EPOCH" {} +
}

make_tar() {
    local name=walpost-$version-$machine-linux-gnu share=$tree/usr/share
    local top=$folder/$name
    rm -rf "$top"
    install --directory "$top/man" "$top/completions"
    install --mode=755 "$program" "$top/walpost"
    install --mode=644 README.md CHANGELOG.md LICENSE deploy/package/walpost.toml deploy/systemd/walpost.service \
        "$share/doc/walpost/THIRD-PARTY.txt" "$top"
    cp -r sql "$top/sql"
    cp -r "$share/doc/walpost/docs" "$top/docs"
    cp "$share"/man/man1/* "$top/man"
    cp "$share/bash-completion/completions/walpost" "$top/completions/walpost.bash"
    cp "$share/fish/vendor_completions.d/walpost.fish" "$share/zsh/site-functions/_walpost" "$top/completions"
    tar --create --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --directory "$folder" "$name" |
        gzip --no-name --best >"$out/$name.tar.gz"
    rm -rf "$top"
}

make_deb() {
    local root=$folder/deb kilobytes
    rm -rf "$root"
    cp -a "$tree" "$root"
    install --directory "$root/DEBIAN" "$root/usr/share/zsh/vendor-completions"
    mv "$root/usr/share/zsh/site-functions/_walpost" "$root/usr/share/zsh/vendor-completions/"
    rmdir "$root/usr/share/zsh/site-functions"
    install --mode=755 deploy/package/deb/* "$root/DEBIAN"
    kilobytes=$(du --summarize --apparent-size --block-size=1K --exclude=DEBIAN "$root" | cut -f1)
    sed -e "s/@VERSION@/$version/" -e "s/@ARCHITECTURE@/$architecture/" -e "s/@SIZE@/$kilobytes/" -e "s/@GLIBC@/$glibc/" \
        deploy/package/deb.control >"$root/DEBIAN/control"
    (cd "$root" && find usr -type f -print0 | sort --zero-terminated | xargs --null md5sum) >"$root/DEBIAN/md5sums"
    dpkg-deb --build --root-owner-group -Zxz "$root" "$out/walpost_${version}_$architecture.deb" >/dev/null
    rm -rf "$root"
}

make_rpm() {
    local list=$folder/rpm.list top=$folder/rpm
    rm -rf "$top"
    {
        # Only Walpost's own folders; the other folders belong to the system.
        echo '%ghost %dir %verify(not mode user group) %attr(0750, root, root) /etc/walpost'
        for path in /usr/share/walpost /usr/share/doc/walpost; do
            (cd "$tree" && find ".$path" -type d -printf '%%dir %%attr(0755, root, root) %p\n') | sed 's# \./# /#'
        done
        (cd "$tree" && find . -type f -printf '%%attr(0%m, root, root) %p\n') | sed 's# \./# /#'
    } >"$list"
    rpmbuild -bb --quiet --target "$machine" --define "_topdir $(cd "$folder" && pwd)/rpm" --define "_rpmdir $out" \
        --define '_rpmfilename %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm' --define "walpost_version $version" \
        --define "walpost_tree $(cd "$tree" && pwd)" --define "walpost_list $(cd "$folder" && pwd)/rpm.list" \
        --define '_build_id_links none' --define '_missing_build_ids_terminate_build 0' --define '_buildhost localhost' --define 'use_source_date_epoch_as_buildtime 1' \
        --define 'clamp_mtime_to_source_date_epoch 1' deploy/package/rpm.spec >/dev/null
    rm -rf "$top" "$list"
}

check_program
rm -rf "$out"
mkdir -p "$out"
make_tree
make_tar
make_deb
make_rpm
cp "$sbom" "$out/walpost-$version.cdx.json"
cp "$chart" "$out/"
(cd "$out" && sha256sum -- * >SHA256SUMS && ls -l --human-readable)
