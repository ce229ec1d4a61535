package kvsidecar

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
)

const httpPatience = time.Second

// DefaultTarget is the first worker of `kvsidecar serve`.
func DefaultTarget() string {
	folder := fmt.Sprintf("/tmp/kvsidecar-%d", os.Getuid())
	if chosen := os.Getenv("KVSIDECAR_RUNTIME_DIR"); chosen != "" {
		folder = chosen
	} else if base := os.Getenv("XDG_RUNTIME_DIR"); base != "" {
		folder = filepath.Join(base, "kvsidecar")
	}
	return "unix:" + filepath.Join(folder, "worker-0.sock")
}

// isURL reports whether an address is a gateway's URL, which gRPC would resolve as a host name.
func isURL(target string) bool {
	lower := strings.ToLower(target)
	return strings.HasPrefix(lower, "http:") || strings.HasPrefix(lower, "https:")
}

// speaksHTTP reports whether a server that is not gRPC answers HTTP at host:port.
func speaksHTTP(target string) bool {
	connection, err := net.DialTimeout("tcp", target, httpPatience)
	if err != nil {
		return false
	}
	defer connection.Close()
	if connection.SetDeadline(time.Now().Add(httpPatience)) != nil {
		return false
	}
	if _, err := io.WriteString(connection, "HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"); err != nil {
		return false
	}
	said := make([]byte, len("HTTP/"))
	_, err = io.ReadFull(connection, said)
	return err == nil && string(said) == "HTTP/"
}

func errHTTP(target string) *Error {
	return refusal(target + " is an HTTP address, such as the gateway's; give a worker's gRPC: its socket (unix:/PATH) or HOST:PORT")
}

// refusal is an error of the client itself, without a call.
func refusal(message string) *Error {
	return &Error{Code: codes.InvalidArgument, Reason: reasonOf[codes.InvalidArgument], Message: message}
}
