"""Scripts whose programs get the same arguments from bash and from the reader of scripts."""

from __future__ import annotations

from itertools import product

# ruff: noqa: E501 (scripts in one line)
SCRIPTS = {
    "subshell keeps nothing": 'A=1; B=(x); f() { train old; }; ( A=2; B+=(y); unset C; f() { train new; }; f; export D=4; set -- q; cd /tmp ); train $A "${B[@]}" "${D-none}" $#; f',
    "pipe keeps nothing": 'A=1; { A=2; echo x; } | { A=3; cat > /dev/null; train $A; }; train $A; echo 5 | read A; train $A; A=7 | A=8; train $A',
    "output keeps nothing": 'A=1; f() { echo old; }; X=$(f() { echo new; }; A=2; cd /usr; f; pwd); train $X $A $(f) $(cd /usr/bin && pwd)',
    "background keeps nothing": 'A=1; A=2 & wait; { A=3; } & wait; train $A',
    "folders": 'cd /usr; train $(pwd) $PWD; ( cd bin; train $(pwd) ); train $(cd lib; pwd) $(pwd); cd - > /dev/null; cd /usr/lib/..; train $PWD',
    "separators split": 'X="a:b  c:"; IFS=:; set -- $X; train "$#" "$@"; IFS=" :"; train $X; IFS=; train $X; unset IFS; train $X',
    "separators in words": 'IFS=,; X=",a,,b,"; train $X; train $X"q"; train "q"$X; IFS=", "; X="a , b,, c"; train $X; A=(1 2 3); train "${A[*]}" ${A[*]}; Y=${A[*]}; train "$Y" $Y',
    "empty words": 'E=""; A=("" x ""); train $E "$E" a$E ""$E ${A[@]}; train "${A[@]}"; set -- ; train "$@" "a$@b" x"$*"; train "${E:-}" ${E:-}',
    "trailing lines": 'X=$(printf "x\\n\\n"); train "$X" "[$(printf "\\n\\na\\n\\n")]" "$(echo; echo a; echo)"; Y=$(printf a; echo b; printf "%s" c); train "$Y" $(printf "a b\\n c")',
    "alternatives": 'A="1 2"; unset U; E=; train ${U:-$A} "${U:-$A}" ${U-"a b" c} "${U:-"q r"}" ${E:-x} "${E-x}" ${A:+--a "$A"} "${A:+--a $A}" ${E:+no} "${E+yes}"',
    "alternatives of arrays": 'A=(--x "1 2"); B=(); train ${A[@]+"${A[@]}"} ${B[@]+"${B[@]}"} "${A[@]:+"${A[@]}"}" "${B[@]:-none at all}"; set -- ; train "${@:-d e}" ${1:-one}; set -- p "q r"; train ${1+"$@"}',
    "assigned alternatives": ': ${X:=a b}; train "$X" ${X:?unset}; : "${Y:="c  d"}" ${Z=$X}; train "$Y" "$Z" "${X?no}"',
    "removed": 'P="a/b.c/d.tar.gz"; Q="*"; S="x*y*z"; train ${P%.*} ${P%%.*} ${P#*/} ${P##*/} ${P%/} ${S%"$Q"*} ${S%%\\**} ${P%[a-z]} ${P#?} "${P%%[!a-z/]*}" ${P##*[./]}',
    "replaced": 'P="a/b/a.b"; R="x y"; train ${P/a/X} ${P//a/X} ${P/#a/X} ${P/%b/X} ${P//\\//_} ${P/b} ${P//[ab]/"$R"} "${P//[ab]/$R}" ${P//./\\/} ${P/a*b/Z} ${P////-} "${P/#/pre}" ${P/%/post} ${R// /}',
    "replaced in arrays": 'A=(a1 b1 "c 1"); train "${A[@]/1/2}" ${A[@]/#/--} "${A[@]%1}" "${A[@]^^}" "${A[@]^}" ${A[@]//[a-b]/}',
    "parts": 'X=abcdef; A=(a b c d); N=2; set -- p q r s; train ${X:1} ${X: -2} ${X:1:-1} ${X:N:2} ${X:$((N+1))} "${A[@]:1:2}" "${A[@]: -1}" ${@:2} "${@:1:2}" ${@: -1} ${A[-1]} ${A:0:1} "${X:9}" ${*:3:1}; A=(one); train "${A[@]:1}" end "${A[@]:0:1}"',
    "array changes": 'A=(a b); A+=(c "d e"); A+=(); A[1]=B; A[${#A[@]}]=f; A[-1]=F; A+=x; train "${A[@]}" ${#A[@]} ${!A[@]} ${#A[3]} ${#A}; A=z; train "${A[@]}"; unset "A[0]"; train "${A[@]}"; B=x; B+=(y); B+=z; train "${B[@]}"; i=0; C[i++]=p; C[i++]=q; train "${C[@]}" $i',
    "maps": 'declare -A M; M[a]=1; M["b c"]=2; k=a; M[$k]+=x; M+=([d]=3); train "${M[a]}" "${M["b c"]}" "${M[b c]}" ${M[d]} ${#M[@]} "${M[none]-no}"; unset "M[a]"; train ${#M[@]} ${M[a]:-gone}; [[ -v M[d] ]] && train has; for k in "${!M[@]}"; do :; done; train "${M[$k]}"',
    "documents": 'A="x  y"; read -r B C <<< "1 2 3"; train "$B" "$C"; while read -r l; do train "[$l]"; done <<EOF\n  $A \\$A "q"\n$(echo in) `echo too` \\\\ \\"\nEOF\nwhile IFS= read -r l; do train "$l"; done <<\'E\'\n  $A $(x)\nE\ncat <<-E | { read x; train "$x"; }\n\ttab $A\n\tE\ntrain end',
    "documents as scripts": 'A=1; export B=2; bash <<EOF\necho $A "\\$B" "[\\${A-unset}]"\nEOF\nX=$(cat <<E\na\n b\nE\n); train "$X" "$(cat <<< "$A")"',
    "input": 'f() { while read -r a b; do train "$a" "$b"; done; }; printf "1 2 3\\n4\\n" | f; f < <(echo "x y"); mapfile -t L < <(printf "p q\\nr\\n"); train "${L[@]}"; IFS=, read -ra W <<< "a,b c,,d"; train "${W[@]}"; IFS=: read a b c <<< "1::3:4"; train "$a" "$b" "$c"; echo "a b" | while read x y; do train $y; done; read -r REST <<< "  sp  "; train "$REST"',
    "patterns of case": 'for w in abc a.c "" x1 "*" YES; do case "$w" in a?c) train 1;; "") train 2 ;; x[0-9]|y) train 3 ;& z) train 4 ;; "*") train 5;; [Yy]*) train 6 ;;& *) train 7; esac; done; case a-b in (a-*) train 8; esac; p="a*"; case abc in "$p") train no;; $p) train 9;; esac',
    "getopts": 'while getopts "a:bc:" o; do train $o "${OPTARG-}"; done; shift $((OPTIND - 1)); train "$@" $OPTIND; OPTIND=1; set -- -bcx -q -a; while getopts ":a:bc:" o; do train "$o" "${OPTARG-none}"; done; f() { local OPTIND o; while getopts x:y o; do train f $o $OPTARG; done; }; f -yx 3; f -x 4 -- -y',
    "arithmetic": 'a=5; b=3; c="a+1"; A=(1 2 3); train $((a/b)) $((-a/b)) $((-a%b)) $((a**b)) $((a<<2|1)) $((a&b^6)) $((~a)) $((!a)) $((a>b&&b>4)) $((a<b||b<4)) $((a>b?a:b)) $((c*2)) $((0x1F+010+2#101+36#z)) $((A[1]+A[a-4])) $((a==5,b+=2)) $b $((b++ + ++b)) $b $((a-=1)) $((7-2-1)) $((2**3**2)) $((1<2==1)) $(( (a+b) * 2 )) $((9223372036854775807+1)) $((${a}0 % 7)) $((a<=4)) $((a>=5)) $((x=3, x*=2)) $x $(($b%4)) $((1 ? 2 : 0 ? 3 : 4)) $((-2**2)) $((10/3*3)) $((a--)) $a',
    "arithmetic commands": 'for ((i=0,j=3;i<=j;i++,j--)); do train $i $j; done; ((i>=2)) && train yes; (( i<<=1 )); train $i; let "k = i * 2" l=k+1; train $k $l; if ((k==i*2 && !(l<k))); then train ok; fi; n=0; while ((n++<2)); do train $n; done; declare -i z=2+3; z+=4; train $z; ((0)) || train zero; (( i )) ; train $?',
    "braces": 'x=q; train {a,b}{1..3} pre{x,${x},"y z"}post {1..10..4} {03..1} {c..a} a{,b} {a} {a,b "{c,d}" \\{e,f} {{1,2},3} {5..3} {-1..1} ${x}{1,2} {1..2}{a..b} "{1..2}" ; A={a,b}; train $A; for i in {1..3}; do train $i; done; B=({1..3} x{y,z}); train "${B[@]}" {}',
    "expressions": 'x=llama3-8B; [[ $x =~ ^llama([0-9]+)-([0-9]+)B$ ]] && train "${BASH_REMATCH[@]}"; [[ $x =~ (a|b).*B ]] && train "${BASH_REMATCH[1]}"; [[ a.b =~ "a.b" ]] && train 1; [[ axb =~ "a.b" ]] || train 2; r="^l+a"; [[ $x =~ $r ]] && train "$BASH_REMATCH"; [[ "a b" =~ ^[[:alpha:]][[:space:]]b$ ]] && train 3; [[ $x =~ [0-9]{2} ]] || train 4; [[ ab =~ a\\.b ]] || train 5',
    "tests": 'x=abc; e=; [[ $x == a* ]] && train 1; [[ $x == "a*" ]] || train 2; [[ ( $x == a || -n $x ) && ! -z $x ]] && train 3; [[ $x != +(a|b|c) ]] || train 4; [[ $x == @(abc|d) ]] && train 5; [ -n "$e" ] || train 6; [ "$x" = abc -a -z "$e" ] && train 7; [[ $e ]] || train 8; [[ a < b ]] && train 9; [ 5 -gt 3 ] && train 10; [[ 2+3 -eq 5 ]] && train 11; [ ! "$x" = q ] && train 12; test "$x" != "$e" && train 13; [[ -v x && ! -v nothing ]] && train 14; [[ $x = [a-c]b? ]] && train 15; [ "$x" ] && train 16; [ ] || train 17; [ "(" = "(" ] && train 18; [[ 010 -eq 8 ]] && train 19',
    "exported": 'A=1; export B=2 C; C=3; D=4 bash -c \'printf "%s\\n" x\'; train "${D-none}"; export "E=5 6" F=$A; train "$E" $F; A=9 B=8; train $A $B; f() { train "$A" "${G-}"; }; A=10 G=11 f; train $A "${G-none}"; export G="$A"x; train $G',
    "local": 'x=1; f() { local x; train "${x-unset}"; x=2; g; local y=3 z=(a b); train "${z[@]}"; }; g() { train $x; x=4; }; f; train $x "${y-no}" "${z-no}"; h() { local -n r=$1; r=7; train $r; }; h x; train $x; k() { declare q=1; declare -g w=2; }; k; train "${q-no}" $w; m() { local a=$1 b; b=$a; train $b; }; m "s t"',
    "status": 'f() { return $1; }; f 3; train $?; f 0 && train ok; f 2 || train bad $?; if f 1; then train no; else train else; fi; ! f 1; train $?; ( exit 4 ); train $?; (exit 0) && train zero; x=$(exit 3; echo no); train "[$x]"; g() { [[ $1 == a ]]; }; g a && train a; g b || train b; h() { f 5; return; }; h; train $?; false; train $?; true; train $?',
    "loops": 'for i in 1 2 3; do for j in a b; do [ $j = b ] && continue 2; [ $i = 3 ] && break 2; train $i $j; done; done; set -- x "y z"; for a; do train "$a"; done; for a in "$@"; do train "$a"; done; until [ $# -eq 0 ]; do train $1; shift; done; shift || train none; for x in; do train no; done; i=0; while :; do i=$((i+1)); [ $i -gt 2 ] && break; train $i; done',
    "formats": 'train "$(printf "%s-%s|" a b c)" "$(printf "%03d %5.2f %x" 7 3.14159 255)" "$(printf "%-5s|%5s|" ab cd)" "$(printf "%%d\\t%b" "x\\ty")" "$(printf "no")" "$(printf "%d" 0x10)" "$(printf "%s,")"; printf -v L "%s " a b; train "$L" "$(printf -- "--a %s" 1)" "$(printf "%q" "a b")"; A=(1 2); printf -v J ",%s" "${A[@]}"; train "${J:1}"',
    "echo": 'train "$(echo -n a; echo b)" "$(echo -e "a\\tb\\n")" "$(echo -E "a\\tb")" "$(echo - -n)" "$(echo)" "$(echo "a  b" c)" $(echo "a  b") "$(echo hidden >&2)" "$(echo hidden > /dev/null; echo seen)" "$( { echo a; echo b >&2; } 2>/dev/null )" "$(echo x 1>&2; echo y 2>&1)"',
    "quotes": "a='x y'; train $'a\\'b\\x41\\101\\n' \"a'b\" 'a\"b' \"$a\"'$a'\"\\$a\\`\" a\\ b\"c\" \"\\a\\\\\" \"a\\\nb\" $\"loc\" '' \"\"'' #no\ntrain a#b \"#c\" ${#a} \\#d",
    "nested": 'a=1; train "$(echo "$(echo "${a:-"x"} y")")" `echo \\`echo b\\`` "${a/1/"$(echo "q r")"}" $(echo $(echo a; echo b)) "$( # a comment, it\'s here\n echo "c)"; )" "$((a + $(echo 2)))" $(case_() { echo d; }; case_)',
    "indirect arrays": 'x=y; y=z; z=1; A=(p q); r="A[@]"; s="A[1]"; train ${!x} "${!r}" ${!s} ${!y}; pre_a=1; pre_b=2; train ${!pre_*} "${!pre_@}"; v=U; train ${!v:-default}',
    "grouping": '{ A=1; B=2; } ; train $A $B; { train x; } > /dev/null; if { false || true; } && ! { false; }; then train y; fi; A=1 && B=3 || B=4; train $B; false && A=5; train $A; true && { A=6; train $A; } || train no; f() ( x=5; train $x ); x=0; f; train $x',
    "home": 'HOME=/h/u; train ~ ~/a "~/a" a~ \\~/b; P=~/c; train $P',
    "evaluated": 'n=V; eval "$n=\'a b\'"; train "$V"; eval "f() { train \\"\\$1\\" $n; }"; f "x y"; c=(train 1 "2 3"); "${c[@]}"; cmd="train a \'b c\'"; $cmd; eval $cmd; eval "$cmd" ; set -- 1 2; eval "train \\$$#"',
    "comments": '# it\'s a comment (\ntrain a # b "\n  # c\ntrain d \\\n  --e \\\n  f # g \\\ntrain h\nA=( # one (\n  --x 1 # it\'s\n  # --y 2\n  --z "3 # 4"\n)\ntrain "${A[@]}"',
    "integers of texts": 'x=007; y=08; train $((10#$y + 1)) $((x)) ${#x} $((10#0$x)); [ 08 -eq 8 ] && train eq; n=5; train $(( n > 3 ? n : 0 )) $((n%2==1)) "$((n))G" $[n+1]',
    "case of letters": 'x="hello World"; train "${x^}" "${x^^}" "${x,,}" "${x^^[lo]}" "${x@U}" ${x@Q}; y=ABC; train "${y,}"',
    "set": 'set -euo pipefail; set -x; train $#; set -- a "b c"; train "$@"; set -o errexit; set d e; train "$@"; set -- "${@:2}" f; train "$*"; set --; train $#',
    "heredoc in function": 'f() { cat <<E\n$1 $2\nE\n}\nX=$(f a "b c"); train "$X"; for l in $(cat <<E\na b\nc\nE\n); do train $l; done',
    "default of positional": 'f() { local a=${1:-x} b=${2:-"y z"} c=${3:-}; shift 2 2>/dev/null; train "$a" "$b" "[$c]" "$@"; }; f; f 1; f 1 2 3 4; f "" "" "" q',
}  # fmt: skip
"""Scripts by the feature that they use; a function ``train`` is the program."""

VALUES = ("", "a", "a b", "  a  b ", "a:b::c:", ":", "/x/y.tar.gz", "*.[a-z]?", "a\\b", "Ab-1,2")
_OPERATIONS = (
    "", ":-d e", "-d", ":+--f", "+'g h'", "%.*", "%%.*", "#*/", "##*/", "%?", "#?", "%[a-z]", "/a/X", "//[ab]/Y", "/#a/Z",
    "/%b/Z", "// /_", "//\\//-", "//:/ ", "/*b/W", ":1", ":1:2", ": -2", ":2:9", "^", "^^", ",,", "^^[ab]",
)  # fmt: skip
_SEPARATORS = (" \t\n", ":", " :", "", "a")


def every_expansion() -> str:
    """A script that expands each value with each operation and each IFS, with and without quotes."""
    lines = ["set -f"]
    for separators, value in product(_SEPARATORS, VALUES):
        lines.append(f"IFS=$'{separators.encode('unicode_escape').decode()}'; X='{value}'; A=(\"$X\" 'q r' \"$X\")")
        if value == VALUES[0]:
            lines.append("unset IFS" if separators == _SEPARATORS[0] else ":")
        for operation in _OPERATIONS:
            lines.append(f'train ${{X{operation}}} "${{X{operation}}}" p${{X{operation}}}q')
        lines.append('train ${A[@]} "${A[@]}" ${A[*]} "${A[*]}" x${A[@]}y "x${A[@]}y" ${#A[@]} "${A[@]:1}" ${#X}')
        lines.append('set -- $X; train $# "$@"; Y=$X; train "$Y"; for w in $X-; do train "$w"; done')
        lines.append(
            'case $X in a*b) train 1;; *.*) train 2;; "") train 3;; *) train 4; esac; train $(echo "$X") "$(printf "%s|" $X)"'
        )
        lines.append(
            '[[ $X == *a* ]] && train yes; [[ $X =~ ^[a-z]+ ]] && train "$BASH_REMATCH"; [ -n "$X" ] || train no'
        )
    return "\n".join(lines)


def every_arithmetic() -> str:
    """A script that joins numbers with each pair of operators."""
    binary = (
        "+",
        "-",
        "*",
        "/",
        "%",
        "**",
        "<<",
        ">>",
        "&",
        "|",
        "^",
        "&&",
        "||",
        "<",
        "<=",
        ">",
        ">=",
        "==",
        "!=",
        ",",
    )
    lines = ["a=7; b=3; c=2"]
    for first, second in product(binary, binary):
        lines.append(
            f"train $((a {first} b {second} c)) $((a{first}((b{second}c)+9))) $(( - a {first} b {second} + c ? a : b ))"
        )
    for how in ("+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^=", "="):
        lines.append(f"x=13; train $((x {how} 5)) $x $((x++ + x--)) $((-x % 4)) $((x{how}b{how}c)) $x $b; b=3")
    return "\n".join(lines)
