package kvsidecar

import (
	"encoding/binary"
	"encoding/hex"
	"math/bits"
)

const (
	prime32a, prime32b, prime32c = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D

	prime64a uint64 = 0x9E3779B185EBCA87
	prime64b uint64 = 0xC2B2AE3D27D4EB4F
	prime64c uint64 = 0x165667B19E3779F9
	prime64d uint64 = 0x85EBCA77C2B2AE63
	prime64e uint64 = 0x27D4EB2F165667C5
	mixerA   uint64 = 0x165667919E3779F9
	mixerB   uint64 = 0x9FB21C651E98DF25

	stripe, stripesPerBlock = 64, 16
)

var secret = func() []byte {
	bytes, _ := hex.DecodeString("b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221" +
		"b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8" +
		"a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb" +
		"170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e")
	return bytes
}()

// Checksum is XXH3-64 of a payload, without a seed
// (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, section XXH3).
func Checksum(data []byte) uint64 {
	n := len(data)
	switch {
	case n == 0:
		return avalanche64(key(56) ^ key(64))
	case n <= 3:
		first := uint32(data[0])<<16 | uint32(data[n>>1])<<24 | uint32(data[n-1]) | uint32(n)<<8
		return avalanche64(uint64(first) ^ uint64(uint32(key(0))^uint32(key(4))))
	case n <= 8:
		head, tail := uint64(binary.LittleEndian.Uint32(data)), uint64(binary.LittleEndian.Uint32(data[n-4:]))
		h := tail + head<<32 ^ key(8) ^ key(16)
		h ^= bits.RotateLeft64(h, 49) ^ bits.RotateLeft64(h, 24)
		h *= mixerB
		h ^= h>>35 + uint64(n)
		h *= mixerB
		return h ^ h>>28
	case n <= 16:
		low, high := word(data, 0)^key(24)^key(32), word(data, n-8)^key(40)^key(48)
		return avalanche(uint64(n) + bits.ReverseBytes64(low) + high + folded(low, high))
	case n <= 240:
		return medium(data)
	default:
		return long(data)
	}
}

func medium(data []byte) uint64 {
	n := len(data)
	sum := uint64(n) * prime64a
	if n <= 128 {
		for i := (n - 1) / 32; i >= 0; i-- {
			sum += mixed(data, 16*i, 32*i) + mixed(data, n-16*(i+1), 32*i+16)
		}
		return avalanche(sum)
	}
	for i := 0; i < 8; i++ {
		sum += mixed(data, 16*i, 16*i)
	}
	sum = avalanche(sum)
	for i := 8; i < n/16; i++ {
		sum += mixed(data, 16*i, 16*(i-8)+3)
	}
	return avalanche(sum + mixed(data, n-16, 136-17))
}

func long(data []byte) uint64 {
	n := len(data)
	lanes := [8]uint64{prime32c, prime64a, prime64b, prime64c, prime64d, prime32b, prime64e, prime32a}
	last := (n - 1) / stripe
	for i := 0; i < last; i++ {
		accumulate(&lanes, data[stripe*i:], 8*(i%stripesPerBlock))
		if i%stripesPerBlock == stripesPerBlock-1 {
			for lane := range lanes {
				lanes[lane] = (lanes[lane] ^ lanes[lane]>>47 ^ key(128+8*lane)) * prime32a
			}
		}
	}
	accumulate(&lanes, data[n-stripe:], 121)
	sum := uint64(n) * prime64a
	for i := 0; i < 4; i++ {
		sum += folded(lanes[2*i]^key(11+16*i), lanes[2*i+1]^key(19+16*i))
	}
	return avalanche(sum)
}

func accumulate(lanes *[8]uint64, data []byte, at int) {
	for i := range lanes {
		value := word(data, 8*i)
		keyed := value ^ key(at+8*i)
		lanes[i^1] += value
		lanes[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32)
	}
}

func key(at int) uint64               { return binary.LittleEndian.Uint64(secret[at:]) }
func word(data []byte, at int) uint64 { return binary.LittleEndian.Uint64(data[at:]) }

func mixed(data []byte, at, secretAt int) uint64 {
	return folded(word(data, at)^key(secretAt), word(data, at+8)^key(secretAt+8))
}

func folded(a, b uint64) uint64 {
	high, low := bits.Mul64(a, b)
	return high ^ low
}

func avalanche(h uint64) uint64 {
	h ^= h >> 37
	h *= mixerA
	return h ^ h>>32
}

func avalanche64(h uint64) uint64 {
	h ^= h >> 33
	h *= prime64b
	h ^= h >> 29
	h *= prime64c
	return h ^ h>>32
}
